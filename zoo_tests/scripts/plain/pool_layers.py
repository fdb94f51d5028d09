"""Features from the last hidden layers."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import RobertaConfig, RobertaModel

torch.manual_seed(34)
config = RobertaConfig(vocab_size=77, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=36,
                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.roberta = RobertaModel(config)
        self.out = nn.Linear(24, 2)

    def forward(self, input_ids, attention_mask, labels):
        outputs = self.roberta(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        pooled = torch.stack(outputs.hidden_states[-2:]).mean(0)[:, 0]
        logits = self.out(pooled)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


model = Pooled()
data = [{"input_ids": torch.randint(2, 77, (8,)), "attention_mask": torch.ones(8, dtype=torch.long), "labels": i % 2}
        for i in range(16)]  # fmt: skip
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in loader:
    result = model(**batch)
    result["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{result['loss'].item():.10f}")

"""A small student learns from a teacher's probabilities and from the labels."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(25)
sizes = {"vocab_size": 101, "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 36, "num_labels": 3}
sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
teacher = BertForSequenceClassification(BertConfig(num_hidden_layers=4, **sizes)).eval()
model = BertForSequenceClassification(BertConfig(num_hidden_layers=2, **sizes))
data = [{"input_ids": torch.randint(1, 101, (8,)), "labels": i % 3} for i in range(16)]
loader = DataLoader(data, batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
T = 2.0
for batch in loader:
    outputs = model(**batch)
    with torch.no_grad():
        target = teacher(input_ids=batch["input_ids"]).logits
    soft = F.kl_div(F.log_softmax(outputs.logits / T, -1), F.softmax(target / T, -1), reduction="batchmean") * T**2
    loss = 0.5 * outputs.loss + 0.5 * soft
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{outputs.loss.item():.10f} {soft.item():.10f}")

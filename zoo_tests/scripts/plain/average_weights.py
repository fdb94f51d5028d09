"""An exponential moving average of the weights, evaluated at the end."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(19)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = BertForSequenceClassification(config)
data = [{"input_ids": torch.randint(1, 101, (8,)), "labels": i % 2} for i in range(16)]
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    averaged.update_parameters(model)
averaged.eval()
with torch.no_grad():
    print(f"{loss.item():.10f} {averaged(**batch).loss.item():.10f}")

"""Masked language modelling with masks drawn in the collator."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

torch.manual_seed(28)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = BertForMaskedLM(config)
generator = torch.Generator().manual_seed(1)


def mask(samples):
    ids = torch.stack(samples)
    masked = torch.rand(ids.shape, generator=generator) < 0.25
    return {"input_ids": ids.masked_fill(masked, 4), "labels": ids.masked_fill(~masked, -100)}


loader = DataLoader(list(torch.randint(5, 101, (16, 10))), batch_size=8, collate_fn=mask)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.10f}")

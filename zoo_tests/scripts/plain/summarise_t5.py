"""Sequence to sequence with Adafactor, as its authors trained it."""

import torch
from torch.utils.data import DataLoader
from transformers import Adafactor, T5Config, T5ForConditionalGeneration

torch.manual_seed(6)
config = T5Config(vocab_size=83, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
                  decoder_start_token_id=0)  # fmt: skip
model = T5ForConditionalGeneration(config)
pairs = [{"input_ids": torch.randint(2, 83, (10,)), "labels": torch.randint(2, 83, (6,))} for _ in range(16)]
loader = DataLoader(pairs, batch_size=4)
optimizer = Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False, warmup_init=False)
for batch in loader:
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    print(f"train loss {loss.item():.10f}")

"""Samples that arrive one by one."""

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(16):
            ids = torch.randint(0, 97, (10,), generator=generator)
            yield {"input_ids": ids, "labels": ids}


torch.manual_seed(35)
config = GPT2Config(vocab_size=97, n_positions=16, n_embd=24, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0)  # fmt: skip
model = GPT2LMHeadModel(config)
loader = DataLoader(Stream(), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.10f}")

"""Train a small language model from scratch on blocks of one long text."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(2)
text = torch.randint(0, 97, (24 * 12,))
blocks = TensorDataset(text.view(24, 12))
config = GPT2Config(vocab_size=97, n_positions=16, n_embd=24, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0)  # fmt: skip
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
loader = DataLoader(blocks, batch_size=4, shuffle=True, drop_last=True)

for (ids,) in loader:
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.10f} perplexity {loss.exp().item():.8f}")

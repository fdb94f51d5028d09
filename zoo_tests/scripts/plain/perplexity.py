"""Perplexity of a text in strides, with the part that is only context masked by -100."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(3)
config = GPT2Config(vocab_size=97, n_positions=16, n_embd=24, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0)  # fmt: skip
model = GPT2LMHeadModel(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
text = torch.randint(0, 97, (1, 40))
for start in range(0, 32, 8):
    ids = text[:, start : start + 16]
    labels = ids.clone()
    labels[:, :4] = -100
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

model.eval()
losses, previous = [], 0
for start in range(0, 40, 8):
    end = min(start + 16, 40)
    ids = text[:, start:end]
    labels = ids.clone()
    labels[:, : -(end - previous)] = -100
    with torch.no_grad():
        losses.append(model(input_ids=ids, labels=labels).loss)
    previous = end
    if end == 40:
        break
print(f"perplexity {torch.stack(losses).mean().exp().item():.9f}")

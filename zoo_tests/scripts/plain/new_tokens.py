"""Add tokens to the vocabulary, start them at the mean, and train with the head tied."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(39)
config = GPT2Config(vocab_size=97, n_positions=16, n_embd=24, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0)  # fmt: skip
model = GPT2LMHeadModel(config)
model.resize_token_embeddings(103, mean_resizing=False)
with torch.no_grad():
    table = model.get_input_embeddings().weight
    table[97:] = table[:97].mean(0)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 103, (12, 10))]
loader = DataLoader(data, batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.10f}")
model.save_pretrained("grown")
again = GPT2LMHeadModel.from_pretrained("grown")
print(f"{again.get_input_embeddings().weight.double().sum().item():.8f}")

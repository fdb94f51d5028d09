"""Several documents in one row, told apart by positions that restart."""

import torch
from torch.utils.data import DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(29)
config = Qwen2Config(vocab_size=91, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2)  # fmt: skip
model = Qwen2ForCausalLM(config)
data = []
for i in range(8):
    cut = 4 + i % 5
    positions = torch.cat([torch.arange(cut), torch.arange(14 - cut)])
    ids = torch.randint(1, 91, (14,))
    labels = ids.clone()
    labels[cut] = -100
    data.append({"input_ids": ids, "position_ids": positions, "labels": labels})
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for _ in range(2):
    for batch in loader:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{loss.item():.10f}")

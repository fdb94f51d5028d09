"""Look at what the model writes while it learns."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(36)
config = LlamaConfig(vocab_size=91, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
                     pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
model = LlamaForCausalLM(config)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 91, (12, 10))]
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
prompt = torch.tensor([[5, 6, 7]])
for batch in loader:
    model.train()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    tokens = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    print(f"{loss.item():.10f}", *tokens[0].tolist())

"""A mixture of experts with the router's loss."""

import torch
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(32)
config = MixtralConfig(vocab_size=91, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=2, num_local_experts=4, output_router_logits=True)  # fmt: skip
model = MixtralForCausalLM(config)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 91, (16, 9))]
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in loader:
    outputs = model(**batch)
    loss = outputs.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.10f} {outputs.aux_loss.item():.10f}")

"""Direct preference optimisation, written out."""

import copy

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(26)
config = LlamaConfig(vocab_size=91, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
                     pad_token_id=0)  # fmt: skip
model = LlamaForCausalLM(config)
reference = copy.deepcopy(model).eval()
data = [{"chosen": torch.randint(1, 91, (9,)), "rejected": torch.randint(1, 91, (9,))} for _ in range(16)]
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def log_probability(lm, ids):
    logits = lm(input_ids=ids).logits[:, :-1]
    return F.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


for batch in loader:
    chosen, rejected = batch["chosen"], batch["rejected"]
    with torch.no_grad():
        margin = log_probability(reference, chosen) - log_probability(reference, rejected)
    ratio = log_probability(model, chosen) - log_probability(model, rejected) - margin
    loss = -F.logsigmoid(0.1 * ratio).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.10f}")

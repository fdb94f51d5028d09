"""Sentence embeddings: two passes through one encoder meet in a cosine loss."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel

torch.manual_seed(24)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = BertModel(config)
data = [(torch.randint(1, 101, (8,)), torch.randint(1, 101, (6,)), float(i % 2)) for i in range(16)]
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def embed(ids):
    mask = (ids > 0).unsqueeze(-1)
    states = model(input_ids=ids).last_hidden_state
    return (states * mask).sum(1) / mask.sum(1)


for first, second, similar in loader:
    loss = F.mse_loss(F.cosine_similarity(embed(first), embed(second)), similar)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.10f}")

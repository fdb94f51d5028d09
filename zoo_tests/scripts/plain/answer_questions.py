"""Extractive question answering: start and end of the answer."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForQuestionAnswering

torch.manual_seed(4)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = BertForQuestionAnswering(config)


class Squad(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, 101, (11,), generator=generator)
        kinds = torch.tensor([0] * 5 + [1] * 6)
        start = index % 6 + 5
        return {
            "input_ids": ids,
            "token_type_ids": kinds,
            "start_positions": start,
            "end_positions": min(start + 2, 10),
        }


loader = DataLoader(Squad(), batch_size=4)
optim = torch.optim.AdamW(model.parameters(), lr=5e-4)
for batch in loader:
    optim.zero_grad()
    start_positions, end_positions = batch["start_positions"], batch["end_positions"]
    outputs = model(batch["input_ids"], token_type_ids=batch["token_type_ids"], start_positions=start_positions,
                    end_positions=end_positions)  # fmt: skip
    loss = outputs[0]
    loss.backward()
    optim.step()
    print(f"{loss.item():.10f}")

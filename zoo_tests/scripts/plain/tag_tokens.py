"""Named entities: labels of sub-words and padding are -100, lengths differ from batch to batch."""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import RobertaConfig, RobertaForTokenClassification

torch.manual_seed(5)
config = RobertaConfig(vocab_size=77, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5,
                       max_position_embeddings=40)  # fmt: skip
model = RobertaForTokenClassification(config)
lengths = torch.randint(5, 15, (20,)).tolist()
sentences = [(torch.randint(2, 77, (n,)), torch.randint(0, 5, (n,))) for n in lengths]


def collate(samples):
    ids = pad_sequence([ids for ids, _ in samples], batch_first=True, padding_value=1)
    labels = pad_sequence([labels for _, labels in samples], batch_first=True, padding_value=-100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": labels}


loader = DataLoader(sentences, batch_size=4, shuffle=True, collate_fn=collate)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(1):
    running = 0.0
    for i, batch in enumerate(loader):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running += loss.item()
        print(f"[{epoch + 1}, {i + 1}] loss: {running / (i + 1):.10f}")

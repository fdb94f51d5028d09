"""A model of one's own around a pretrained encoder."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel


class Classifier(nn.Module):
    def __init__(self, encoder, classes):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Sequential(nn.Linear(encoder.config.hidden_size, 20), nn.Tanh(), nn.Linear(20, classes))

    def forward(self, input_ids, attention_mask=None):
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(states.mean(dim=1))


torch.manual_seed(22)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = Classifier(BertModel(config, add_pooling_layer=False), classes=3)
data = [(torch.randint(1, 101, (8,)), i % 3) for i in range(16)]
loader = DataLoader(data, batch_size=4, shuffle=True)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.10f}")

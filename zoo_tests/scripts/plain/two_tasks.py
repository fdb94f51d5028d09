"""One encoder, two heads, and the sum of their losses."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel, BertPreTrainedModel


class TwoTasks(BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config)
        self.topic = nn.Linear(config.hidden_size, 4)
        self.score = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids, topics, scores):
        pooled = self.bert(input_ids).pooler_output
        topic_loss = nn.functional.cross_entropy(self.topic(pooled), topics)
        score_loss = nn.functional.mse_loss(self.score(pooled).squeeze(-1), scores)
        return topic_loss, score_loss


torch.manual_seed(23)
config = BertConfig(vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
model = TwoTasks(config)
data = [{"input_ids": torch.randint(1, 101, (8,)), "topics": i % 4, "scores": torch.randn(())} for i in range(16)]
loader = DataLoader(data, batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in loader:
    topic_loss, score_loss = model(**batch)
    loss = topic_loss + 0.3 * score_loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{topic_loss.item():.10f} {score_loss.item():.10f}")

"""A vision transformer on small images, momentum and a cosine schedule."""

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

torch.manual_seed(8)
config = ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36, image_size=12,
                   patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4)  # fmt: skip
net = ViTForImageClassification(config)
dataset = TensorDataset(torch.randn(20, 3, 12, 12), torch.arange(20) % 4)
trainloader = DataLoader(dataset, batch_size=4, shuffle=True)
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
scheduler = CosineAnnealingLR(optimizer, T_max=5)
for inputs, labels in trainloader:
    optimizer.zero_grad()
    outputs = net(inputs)
    loss = criterion(outputs.logits, labels)
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"loss: {loss.item():.10f}")

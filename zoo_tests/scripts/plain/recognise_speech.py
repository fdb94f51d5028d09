"""Speech recognition by connectionist temporal classification."""

import torch
from torch.utils.data import DataLoader
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

torch.manual_seed(31)
config = Wav2Vec2Config(vocab_size=20, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=36,
                        conv_dim=(8, 8), conv_kernel=(5, 3), conv_stride=(3, 2), num_conv_pos_embeddings=4,
                        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
                        feat_proj_dropout=0.0, activation_dropout=0.0, final_dropout=0.0, layerdrop=0.0,
                        mask_time_prob=0.0,
                        ctc_loss_reduction="mean")  # fmt: skip
model = Wav2Vec2ForCTC(config)
model.freeze_feature_encoder()
data = [{"input_values": torch.randn(160), "labels": torch.randint(1, 20, (5,))} for _ in range(12)]
loader = DataLoader(data, batch_size=4)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.10f}")

"""Whisper on features of sound."""

import torch
from torch.utils.data import DataLoader
from transformers import WhisperConfig, WhisperForConditionalGeneration

torch.manual_seed(30)
config = WhisperConfig(vocab_size=83, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                       decoder_attention_heads=4, encoder_ffn_dim=36, decoder_ffn_dim=36, num_mel_bins=8, dropout=0.0,
                       max_source_positions=15, max_target_positions=20, pad_token_id=0, bos_token_id=1,
                       eos_token_id=2, decoder_start_token_id=3)  # fmt: skip
model = WhisperForConditionalGeneration(config)
data = [{"input_features": torch.randn(8, 30), "labels": torch.randint(4, 83, (7,))} for _ in range(12)]
train_loader = DataLoader(data, batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in train_loader:
    loss = model(**batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.10f}")

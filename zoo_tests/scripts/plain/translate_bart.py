"""Translation with padded labels and decoder inputs that the script shifts itself."""

import torch
from torch.utils.data import DataLoader
from transformers import BartConfig, BartForConditionalGeneration
from transformers.models.bart.modeling_bart import shift_tokens_right

torch.manual_seed(7)
config = BartConfig(vocab_size=83, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                    decoder_attention_heads=4, encoder_ffn_dim=36, decoder_ffn_dim=36, dropout=0.0,
                    max_position_embeddings=32)  # fmt: skip
model = BartForConditionalGeneration(config)
data = [(torch.randint(3, 83, (9,)), torch.randint(3, 83, (7,)), 3 + i % 4) for i in range(12)]
train_loader = DataLoader(data, batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for source, target, length in train_loader:
    target = target.masked_fill(torch.arange(7) >= length[:, None], 1)
    inputs = shift_tokens_right(target, config.pad_token_id, config.decoder_start_token_id)
    labels = target.masked_fill(target == 1, -100)
    output = model(input_ids=source, decoder_input_ids=inputs, labels=labels)
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{output.loss.item():.10f}")

"""ChatGLM2: configuration and models, which load checkpoints in the original layout."""

from shardformer.models.chatglm2.configuration_chatglm import ChatGLMConfig
from shardformer.models.chatglm2.modeling_chatglm import (
    ChatGLMForConditionalGeneration,
    ChatGLMForSequenceClassification,
    ChatGLMModel,
)

__all__ = ["ChatGLMConfig", "ChatGLMForConditionalGeneration", "ChatGLMForSequenceClassification", "ChatGLMModel"]

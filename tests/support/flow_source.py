"""The tiny vision-language model as a factory, for commands."""

from __future__ import annotations

from etfarm.client import ModelSource
from tests.support.flow_models import image, modules
from tests.support.language_models import CONTEXT, VOCABULARY


def model() -> ModelSource:
    """The model with its flow."""
    own = modules()
    return ModelSource.flow(
        own["text_decoder"],
        token_embedding=own["token_embedding"],
        encoders={"vision_encoder": (own["vision_encoder"], (image(),))},
        max_context_tokens=CONTEXT,
        vocab_size=VOCABULARY,
    )

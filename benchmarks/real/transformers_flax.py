"""Models of Hugging Face `transformers` (its last versions with Flax): configurations of middling size, losses,
inference."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import transformers

from benchmarks.real.steps import STYLES, Lowerable, cross_entropy, key_shape

# Its T5 calls `jnp.clip` by argument names that JAX has since dropped.
_clip = jnp.clip
jnp.clip = lambda x, min=None, max=None, *, a_min=None, a_max=None: _clip(  # type: ignore[assignment]
    x, a_min if min is None else min, a_max if max is None else max
)

BATCH, LENGTH = 64, 512
SHORT = 128


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def made(name: str, config: Any, input_shape: tuple[int, ...] | None = None) -> tuple[Any, Any]:
    """(model without weights, abstract weights)."""
    kind = getattr(transformers, name)
    model = kind(config, _do_init=False, **({"input_shape": input_shape} if input_shape else {}))
    shape = input_shape or model.input_shape
    return model, jax.eval_shape(lambda: model.init_weights(jax.random.PRNGKey(0), shape))


def mode(model: Any, *, training: bool) -> dict[str, bool]:
    """How a model is told whether it is trained: most are asked to `train`, some to be `deterministic`."""
    if "train" in inspect.signature(model.__call__).parameters:
        return {"train": training}
    return {"deterministic": not training}


def masked(name: str, config: Any, style: str = "separate", optimiser: str = "adamw", batch: int = BATCH) -> Lowerable:
    """An encoder that fills in masked tokens, with dropout."""
    model, params = made(name, config, (1, LENGTH))

    def loss(params: Any, batch: Any, key: Any) -> Any:
        out = model(
            batch["ids"], attention_mask=batch["mask"], params=params, dropout_rng=key, train=True, return_dict=True
        )
        return cross_entropy(out.logits, batch["labels"])

    ids = tokens(batch, LENGTH)
    return STYLES[style](loss, params, {"ids": ids, "mask": ids, "labels": ids}, optimiser)


def causal(
    name: str, config: Any, style: str = "separate", optimiser: str = "adamw", batch: int = BATCH, length: int = LENGTH
) -> Lowerable:
    """A decoder that predicts the next token."""
    model, params = made(name, config, (1, length))
    training = mode(model, training=True)

    def loss(params: Any, batch: Any, key: Any) -> Any:
        logits = model(batch["ids"], params=params, dropout_rng=key, return_dict=True, **training).logits
        return cross_entropy(logits[:, :-1], batch["ids"][:, 1:])

    return STYLES[style](loss, params, {"ids": tokens(batch, length)}, optimiser)


def translating(
    name: str, config: Any, style: str = "separate", optimiser: str = "adamw", batch: int = BATCH
) -> Lowerable:
    """An encoder and a decoder, teacher forcing."""
    model, params = made(name, config, (1, SHORT))

    def loss(params: Any, batch: Any, key: Any) -> Any:
        out = model(
            batch["source"],
            decoder_input_ids=batch["target"],
            params=params,
            dropout_rng=key,
            train=True,
            return_dict=True,
        )
        return cross_entropy(out.logits, batch["labels"])

    ids = tokens(batch, SHORT)
    return STYLES[style](loss, params, {"source": ids, "target": ids, "labels": ids}, optimiser)


def images(name: str, config: Any, style: str = "separate", optimiser: str = "adamw", batch: int = 128) -> Lowerable:
    """An image classifier; batch statistics, where there are any, come back with the loss."""
    size = getattr(config, "image_size", 224)
    shape = (1, size, size, 3)
    model, variables = made(name, config, shape)
    channels_first = (batch, 3, size, size)
    statistics = "batch_stats" in variables
    params = variables["params"] if statistics else variables

    def loss(params: Any, batch: Any, key: Any) -> Any:
        if statistics:
            weights = {"params": params, "batch_stats": batch["stats"]}
            out, _ = model(batch["pixels"], params=weights, train=True, return_dict=True)
        else:
            out = model(batch["pixels"], params=params, dropout_rng=key, train=True, return_dict=True)
        return cross_entropy(out.logits, batch["labels"])

    data: dict[str, Any] = {"pixels": jax.ShapeDtypeStruct(channels_first, jnp.float32), "labels": tokens(batch)}
    if statistics:
        data["stats"] = variables["batch_stats"]
    return STYLES[style](loss, params, data, optimiser)


def contrastive(config: Any, style: str = "separate", optimiser: str = "adamw", batch: int = 256) -> Lowerable:
    """CLIP: image and text towers, and the loss over all pairs of a batch."""
    text, size = config.text_config.max_position_embeddings, config.vision_config.image_size
    model, params = made("FlaxCLIPModel", config, ((1, text), (1, size, size, 3)))

    def loss(params: Any, batch: Any, key: Any) -> Any:
        out = model(
            batch["ids"], batch["pixels"], attention_mask=batch["mask"], params=params, dropout_rng=key, train=True,
            return_dict=True,
        )  # fmt: skip
        labels = jnp.arange(out.logits_per_text.shape[0])
        return 0.5 * (cross_entropy(out.logits_per_text, labels) + cross_entropy(out.logits_per_image, labels))

    pixels = jax.ShapeDtypeStruct((batch, 3, size, size), jnp.float32)
    return STYLES[style](
        loss, params, {"ids": tokens(batch, text), "mask": tokens(batch, text), "pixels": pixels}, optimiser
    )


def speech(config: Any, style: str = "separate", optimiser: str = "adamw", batch: int = 64) -> Lowerable:
    """Whisper: spectrograms in, tokens out."""
    frames, text = 2 * config.max_source_positions, 128
    model, params = made("FlaxWhisperForConditionalGeneration", config, (1, config.num_mel_bins, frames))

    def loss(params: Any, batch: Any, key: Any) -> Any:
        out = model(
            batch["features"],
            decoder_input_ids=batch["target"],
            params=params,
            dropout_rng=key,
            train=True,
            return_dict=True,
        )
        return cross_entropy(out.logits, batch["labels"])

    features = jax.ShapeDtypeStruct((batch, config.num_mel_bins, frames), jnp.float32)
    return STYLES[style](
        loss, params, {"features": features, "target": tokens(batch, text), "labels": tokens(batch, text)}, optimiser
    )


def prefill(name: str, config: Any, batch: int = 32, length: int = 1024) -> Lowerable:
    """The forward pass over a prompt, logits of the last token."""
    model, params = made(name, config, (1, length))

    def run(params: Any, ids: Any) -> Any:
        return model(ids, params=params, return_dict=True, **mode(model, training=False)).logits[:, -1]

    return Lowerable(run, (params, tokens(batch, length)))


def generating(name: str, config: Any, batch: int = 32, beams: int = 1, new: int = 64, prompt: int = 64) -> Lowerable:
    """Greedy decoding or beam search with a cache, in the package's own loop."""
    model, params = made(name, config, (1, prompt))

    def run(params: Any, ids: Any) -> Any:
        mask = jnp.ones_like(ids)
        return model.generate(
            ids, attention_mask=mask, params=params, max_length=prompt + new, num_beams=beams, do_sample=False,
            pad_token_id=0, eos_token_id=1, decoder_start_token_id=2,
        ).sequences  # fmt: skip

    return Lowerable(run, (params, tokens(batch, prompt)))


def sampling(name: str, config: Any, batch: int = 32, new: int = 64, prompt: int = 64) -> Lowerable:
    """Sampling from the ten likeliest tokens."""
    model, params = made(name, config, (1, prompt))

    def run(params: Any, ids: Any, key: Any) -> Any:
        return model.generate(
            ids, attention_mask=jnp.ones_like(ids), params=params, max_length=prompt + new, do_sample=True, top_k=10,
            prng_key=key, pad_token_id=0, eos_token_id=1,
        ).sequences  # fmt: skip

    return Lowerable(run, (params, tokens(batch, prompt), key_shape()))

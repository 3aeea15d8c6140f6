"""A decoder from its config: embedding, layers of attention and MLP, norm, head, perhaps an encoder.

What sets decoders apart is in ``DecoderConfig`` and in their weight maps. Submodules have Hugging Face
LLaMA's names (``layers.0.self_attn.o_proj``) for every architecture.

    hidden = decoder.embed(batch.input_ids, batch.positions)
    logits = Operations(decoder, chooser, step).logits(hidden, batch, caches)     # decoder_forward.py
"""

from __future__ import annotations

import torch
from torch import nn

from ingot.config.decoder_config import DecoderConfig
from ingot.config.quantization.quant_config import HEAD
from ingot.kernels.activation.softcap import softcap
from ingot.layers.attention import Attention
from ingot.layers.build_context import BuildContext
from ingot.layers.cross_attention import CrossAttention
from ingot.layers.embedding import Embedding
from ingot.layers.encoder_pass import MODULE_BY_MODULE, EncoderPass
from ingot.layers.forward_batch import ForwardBatch, LayerCache, Spliced
from ingot.layers.linear import Linear
from ingot.layers.mlp import make_mlp
from ingot.layers.norm import make_norm
from ingot.layers.products.layer_products import LayerProducts, Product, SkippingProduct
from ingot.layers.products.row_forms import RawForm, Rows
from ingot.layers.rotary import RotaryTable


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), in any step and any scheme. With wiring ``cross`` there
    is cross-attention to the encoder's outputs between them.

    ``forward`` starts after the layer's first norm and ends after the next layer's: a kernel that adds to the
    hidden states also computes the next norm. Post-norms are ``self_attn_norm`` and ``mlp_norm``.
    """

    def __init__(self, config: DecoderConfig, ctx: BuildContext, index: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, ctx)
        self.self_attn = Attention(config, ctx.at("self_attn"), config.window(index))
        self.self_attn_norm = make_norm(config, ctx) if config.post_norms else None
        self.encoder_attn: CrossAttention | None = None
        if config.crosses:
            self.encoder_attn_layernorm = make_norm(config, ctx)
            self.encoder_attn = CrossAttention(config, ctx.at("encoder_attn"))
        self.post_attention_layernorm = make_norm(config, ctx)
        self.mlp = make_mlp(config, ctx.at("mlp"))
        self.mlp_norm = make_norm(config, ctx) if config.post_norms else None

    def forward(
        self,
        x: Rows,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: torch.Tensor | None,
        products: LayerProducts,
    ) -> tuple[Rows, torch.Tensor]:
        """(normalised input, hidden [T, hidden_size], maybe overwritten) → the same of the next layer."""
        _see(batch, "attn_in", x, products.qkv)
        query = products.qkv.heads(x, self.self_attn, batch, cache, rope)
        output, up, down = products.output, products.up, products.down
        attended = output.form.attention(self.self_attn, query, batch, cache)
        del query  # memory of a long prompt
        _see(batch, "attended", attended, output)
        if batch.encoded is not None:
            attended, hidden, output = self._attended_encoded(attended, hidden, batch, cache, products)
        norm, post = self.post_attention_layernorm, self.self_attn_norm
        x, hidden = output.join(attended, hidden, norm, up.form, post)
        del attended  # as above
        batch.see("stream", hidden)
        _see(batch, "mlp_in", x, up)
        inner = up.inner(x, self.mlp, down.form)
        _see(batch, "inner", inner, down)
        x, hidden = down.join(inner, hidden, products.next_norm, products.after.form, self.mlp_norm)
        batch.see("stream", hidden)
        return x, hidden

    def _attended_encoded(
        self,
        attended: Rows,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        products: LayerProducts,
    ) -> tuple[Rows, torch.Tensor, Product]:
        """Join self-attention, then compute cross-attention up to its output product."""
        attention, encoded = self.encoder_attn, batch.encoded
        assert attention is not None
        assert encoded is not None
        assert products.encoded is not None
        to_query, output = products.encoded
        x, hidden = products.output.join(attended, hidden, self.encoder_attn_layernorm, to_query.form)
        batch.see("stream", hidden)
        _see(batch, "cross_in", x, to_query)
        query = attention.query(to_query.full_output(x))
        batch.see("cross_query", query)
        attended = output.form.attention(attention, query, batch, cache)
        _see(batch, "cross_attended", attended, output)
        if encoded.some_without:
            output = SkippingProduct(output, encoded.lens == 0)
        return attended, hidden, output


def _see(batch: ForwardBatch, name: str, x: Rows, product: Product) -> None:
    """Show the observer a product's input, unless the product itself normalises it."""
    if not isinstance(product.form, RawForm):
        batch.see(name, x)


class Decoder(nn.Module):
    """A language model, perhaps with an ``encoder`` of requests' inputs; its weights are uninitialised."""

    def __init__(
        self, config: DecoderConfig, ctx: BuildContext, max_seq_len: int, encoder: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.quant = ctx.quant
        self.encoder = encoder
        self.encoder_dtype = ctx.dtype  # in which the encoder computes; set where the weights are
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, ctx, config.embedding_scale)
        self.embed_positions = (
            Embedding(config.max_positions, config.hidden_size, ctx) if config.rope is None else None
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, ctx.at(f"layers.{index}"), index) for index in range(config.num_layers)
        )
        self.norm = make_norm(config, ctx)
        head = ctx.at(HEAD)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=config.head_bias, ctx=head)
        self.tie()
        self.rotary = RotaryTable(config.rope, max_seq_len, config.local_rope) if config.rope else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""
        return self.embed_tokens.dtype

    @property
    def tied(self) -> bool:
        """Whether the head's weight is the embedding; not if quantized, or hidden states are rotated."""
        return self.config.tie_word_embeddings and self.quant.head == "none" and not self.quant.rotation

    def tie(self) -> None:
        """Make the head's weight the embedding if ``tied``."""
        if self.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def rope_offset(self, prompt_len: int) -> int:
        """Rows of the rotary table to add to positions for a request with this many prompt tokens."""
        return self.rotary.offset(prompt_len) if self.rotary is not None else 0

    def rope_table(self, layer: int) -> torch.Tensor | None:
        """A layer's cosines and sines, as ``RotaryTable`` has them; None: positions are learned."""
        if self.rotary is None:
            return None
        local = self.rotary.local_table
        return local if local is not None and self.config.window(layer) else self.rotary.table

    def encode(self, features: torch.Tensor, forward_pass: EncoderPass = MODULE_BY_MODULE) -> torch.Tensor:
        """Features of one input, or of N of one shape → [positions, encoder's hidden_size] in the decoder's
        dtype, inputs end to end. The encoder computes in its own.
        """
        assert self.encoder is not None
        encoded: torch.Tensor = self.encoder(features.to(self.encoder_dtype), forward_pass)
        return encoded.to(self.dtype)

    def embed(
        self, input_ids: torch.Tensor, positions: torch.Tensor, spliced: Spliced | None = None
    ) -> torch.Tensor:
        """[T] ids and [T] positions → hidden states [T, hidden_size], some of them ``spliced``."""
        hidden = self.embed_tokens(input_ids)
        if spliced is not None:
            hidden = spliced.over(hidden)
        return hidden if self.embed_positions is None else hidden + self.embed_positions(positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, hidden_size] → [L, vocab_size], in the model's dtype."""
        return self.capped(self.lm_head(hidden))

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """The head's output [L, vocab_size] with the model's softcap, if it has one; in place."""
        cap = self.config.logit_softcap
        return softcap(logits, cap) if cap else logits

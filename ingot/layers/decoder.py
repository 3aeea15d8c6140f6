"""A decoder from its config.

Owns the stack that every model of Ingot has: embedding, layers of attention and MLP, final norm, head. Beside
it may be an encoder, which is the architecture's own. What sets decoders apart is in ``DecoderConfig`` and in
their weight maps. Submodules carry Hugging Face LLaMA's names (``layers.0.self_attn.o_proj``) for every
architecture.

    hidden = decoder.embed(batch.input_ids, batch.positions)
    logits = Operations(decoder, ways, step).logits(hidden, batch, caches)     # decoder_forward.py
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
from ingot.layers.layer_products import LayerProducts, Product, SkippingProduct
from ingot.layers.linear import Linear
from ingot.layers.mlp import make_mlp
from ingot.layers.norm import make_norm
from ingot.layers.rotary import RotaryTable
from ingot.layers.row_forms import RawForm, Rows


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the one way through a layer, in any step and any scheme.
    Between them a layer of wiring ``cross`` attends to what an encoder made of the request's input.

    It starts behind its first norm, and ends behind the next layer's: a norm ends what is before it. With
    post-norms ``self_attn_norm`` and ``mlp_norm`` norm what attention and MLP add.
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
        """(normalised input, hidden states [T, hidden_size]) → the same of the next layer.

        ``hidden`` may be overwritten; ``products`` are this layer's, as product_choice.py chose them.
        """
        attended = self._attended(x, batch, cache, rope, products)
        norm, post = self.post_attention_layernorm, self.self_attn_norm
        output = products.output
        if batch.encoded is not None:
            attended, hidden, output = self._attended_encoded(attended, hidden, batch, cache, products)
        x, hidden = output.join(attended, hidden, norm, products.up.form, post)
        del attended  # memory of a long prompt
        batch.see("stream", hidden)
        inner = self._inner(x, batch, products)
        norm, post = products.next_norm, self.mlp_norm
        x, hidden = products.down.join(inner, hidden, norm, products.after.form, post)
        batch.see("stream", hidden)
        return x, hidden

    def _attended(
        self,
        x: Rows,
        batch: ForwardBatch,
        cache: LayerCache,
        rope: torch.Tensor | None,
        products: LayerProducts,
    ) -> Rows:
        """Attention up to its output product."""
        _see(batch, "attn_in", x, products.qkv)
        query = products.qkv.heads(x, self.self_attn, batch, cache, rope)
        attended = products.output.form.attention(self.self_attn, query, batch, cache)
        _see(batch, "attended", attended, products.output)
        return attended

    def _attended_encoded(
        self,
        attended: Rows,
        hidden: torch.Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        products: LayerProducts,
    ) -> tuple[Rows, torch.Tensor, Product]:
        """The join of self-attention, then cross-attention up to its output product."""
        attention, encoded = self.encoder_attn, batch.encoded
        assert attention is not None
        assert encoded is not None
        assert products.encoded is not None
        to_query, output = products.encoded
        x, hidden = products.output.join(attended, hidden, self.encoder_attn_layernorm, to_query.form)
        batch.see("stream", hidden)
        _see(batch, "cross_in", x, to_query)
        query = attention.query(to_query.whole(x))
        batch.see("cross_query", query)
        attended = output.form.attention(attention, query, batch, cache)
        _see(batch, "cross_attended", attended, output)
        if encoded.some_without:
            output = SkippingProduct(output, encoded.lens == 0)
        return attended, hidden, output

    def _inner(self, x: Rows, batch: ForwardBatch, products: LayerProducts) -> Rows:
        """The MLP up to its down product."""
        _see(batch, "mlp_in", x, products.up)
        inner = products.up.inner(x, self.mlp, products.down.form)
        _see(batch, "inner", inner, products.down)
        return inner


def _see(batch: ForwardBatch, name: str, x: Rows, product: Product) -> None:
    """Keep what a product takes; one that normalises its input itself has nothing to tell."""
    if not isinstance(product.form, RawForm):
        batch.see(name, x)


class Decoder(nn.Module):
    """A language model, with an ``encoder`` of a request's inputs or without; weights are uninitialised until
    an engine is loaded into it.
    """

    def __init__(
        self, config: DecoderConfig, ctx: BuildContext, max_seq_len: int, encoder: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.quant = ctx.quant
        self.encoder = encoder
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
        self.rotary = RotaryTable(config.rope, max_seq_len) if config.rope else None

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states."""
        return self.embed_tokens.weight.dtype

    @property
    def tied(self) -> bool:
        """Whether the head's weight is the embedding itself; a head in fewer bits is a copy, and one of a
        rotated stream a matrix of its own.
        """
        return self.config.tie_word_embeddings and self.quant.head == "none" and not self.quant.rotation

    def tie(self) -> None:
        """Make the head's weight the embedding where it is ``tied``."""
        if self.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def rope_offset(self, prompt_len: int) -> int:
        """Rows to add to positions for a request with this many prompt tokens."""
        return self.rotary.offset(prompt_len) if self.rotary is not None else 0

    def encode(self, features: torch.Tensor, forward_pass: EncoderPass = MODULE_BY_MODULE) -> torch.Tensor:
        """Features of one input, or of N of one shape, in the model's dtype → [positions, encoder's
        hidden_size], of one after another.
        """
        assert self.encoder is not None
        encoded: torch.Tensor = self.encoder(features, forward_pass)
        return encoded

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
        """The head's results [L, vocab_size] with the model's softcap, if it has one; written over."""
        cap = self.config.logit_softcap
        return softcap(logits, cap) if cap else logits

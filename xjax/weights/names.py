"""How checkpoints call what a parameter tree holds.

A field is named by its path in the tree, "embed" or "attention.qkv"; a fused field is made of
several tensors. A family says where it differs (`Family.naming`); names of a layer come
without the prefix that counts layers. Nothing is read here.
"""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from xjax.models.naming import TensorNames

_HF_LAYER = "model.layers.{}."
_HF_FIELDS: Mapping[str, tuple[str, ...]] = {
    "embed": ("model.embed_tokens.weight",),
    "norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
    "attention.norm": ("input_layernorm.weight",),
    "attention.qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attention.o": ("self_attn.o_proj.weight",),
    "attention.o_bias": ("self_attn.o_proj.bias",),
    "attention.q_norm": ("self_attn.q_norm.weight",),
    "attention.k_norm": ("self_attn.k_norm.weight",),
    "feed_forward.norm": ("post_attention_layernorm.weight",),
    "feed_forward.gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "feed_forward.gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "feed_forward.down": ("mlp.down_proj.weight",),
    "feed_forward.down_bias": ("mlp.down_proj.bias",),
    "feed_forward.router": ("mlp.gate.weight",),
    "feed_forward.experts.gate_up": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "feed_forward.experts.down": ("mlp.experts.{}.down_proj.weight",),
    "feed_forward.shared.gate": ("mlp.shared_expert_gate.weight",),
    "feed_forward.shared.gate_up": (
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight",
    ),
    "feed_forward.shared.down": ("mlp.shared_expert.down_proj.weight",),
}
_GGUF_LAYER = "blk.{}."
_GGUF_FIELDS: Mapping[str, tuple[str, ...]] = {
    "embed": ("token_embd.weight",),
    "norm": ("output_norm.weight",),
    "head": ("output.weight",),
    "attention.norm": ("attn_norm.weight",),
    "attention.qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "attention.qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "attention.o": ("attn_output.weight",),
    "attention.o_bias": ("attn_output.bias",),
    "attention.q_norm": ("attn_q_norm.weight",),
    "attention.k_norm": ("attn_k_norm.weight",),
    "attention.post_norm": ("post_attention_norm.weight",),
    "feed_forward.norm": ("ffn_norm.weight",),
    "feed_forward.gate_up": ("ffn_gate.weight", "ffn_up.weight"),
    "feed_forward.gate_up_bias": ("ffn_gate.bias", "ffn_up.bias"),
    "feed_forward.down": ("ffn_down.weight",),
    "feed_forward.down_bias": ("ffn_down.bias",),
    "feed_forward.router": ("ffn_gate_inp.weight",),
    "feed_forward.experts.gate_up": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "feed_forward.experts.down": ("ffn_down_exps.weight",),
    "feed_forward.shared.gate": ("ffn_gate_inp_shexp.weight",),
    "feed_forward.shared.gate_up": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "feed_forward.shared.down": ("ffn_down_shexp.weight",),
    "feed_forward.post_norm": ("post_ffw_norm.weight",),
}
# Where the tensors of a field are when they are not above: a tensor an expert in old files, or a stack.
_HF_ELSE: Mapping[str, tuple[str, ...]] = {
    "feed_forward.experts.gate_up": ("mlp.experts.gate_up_proj",),
    "feed_forward.experts.down": ("mlp.experts.down_proj",),
}
_GGUF_ELSE: Mapping[str, tuple[str, ...]] = {
    "feed_forward.experts.gate_up": ("ffn_gate.{}.weight", "ffn_up.{}.weight"),
    "feed_forward.experts.down": ("ffn_down.{}.weight",),
}
# Tensors that a family's config was read from, or that say nothing it does not: tables of angles.
_REDUNDANT = re.compile(r"(^|\.)(rotary_emb\.inv_freq|rope_(freqs|factors_long|factors_short)\.weight)$")
# Parts of a multi-modal checkpoint beside its text model.
_OTHER_TOWER = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|audio_tower|embed_vision)\.")


@dataclass(frozen=True)
class Names:
    """Names of one checkpoint kind and family.

    layer    pattern of a layer's prefix     fields   tensor names by field
    others   of some fields, names that are used where the first of `fields` is not there
    """

    layer: str
    fields: Mapping[str, tuple[str, ...]]
    others: Mapping[str, tuple[str, ...]]

    def of(self, field: str, layer_id: int | None, tensors: Container[str]) -> tuple[str, ...]:
        """Tensors that a field is made of, of those in a file; "{}" stands for an expert's number."""
        prefix = "" if layer_id is None else self.layer.format(layer_id)
        names = tuple(prefix + name for name in self.fields[field])
        others = tuple(prefix + name for name in self.others.get(field, ()))
        is_elsewhere = others and names[0].format(0) not in tensors and others[0].format(0) in tensors
        return others if is_elsewhere else names


def names_for(kind: str, changes: Mapping[str, TensorNames]) -> Names:
    """Names of a checkpoint kind, "hf" or "gguf", with a family's changes."""
    is_gguf = kind == "gguf"
    layer, fields = (_GGUF_LAYER, _GGUF_FIELDS) if is_gguf else (_HF_LAYER, _HF_FIELDS)
    own = {field: (names,) if isinstance(names, str) else names for field, names in changes.items()}
    return Names(layer, {**fields, **own}, _GGUF_ELSE if is_gguf else _HF_ELSE)


def text_name(name: str) -> str | None:
    """Name of a tensor without what a multi-modal model puts in front; None for another tower's."""
    if _OTHER_TOWER.match(name):
        return None
    return name.replace("model.language_model.", "model.", 1).removeprefix("language_model.")


def unexplained(names: Iterable[str], used: set[str], head: tuple[str, ...]) -> list[str]:
    """Tensors that nothing was made of, redundant ones and a tied head's copy left out."""
    known = used.union(head)
    return sorted(name for name in names if name not in known and not _REDUNDANT.search(name))

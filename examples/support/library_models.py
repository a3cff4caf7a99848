"""Tiny random models of libraries beside transformers, made from configurations: nothing is downloaded.

`MODELS` maps a name, `library/model`, to a function that returns a model and the arguments of a call: positional (a
tuple) or by keyword (a dict). A function imports its library when it is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Arguments = tuple[Any, ...] | dict[str, Any]
Built = tuple[nn.Module, Arguments]
BATCH, SEQ, VOCAB = 2, 8, 99


def images(size: int = 32, channels: int = 3, batch: int = BATCH) -> Tensor:
    """Returns images: [batch channels size size]."""
    return _random(batch, channels, size, size)


def tokens(seq: int = SEQ, vocab: int = VOCAB) -> Tensor:
    """Returns tokens: [batch seq]."""
    return (torch.arange(BATCH * seq) * 17 % (vocab - 2) + 1).view(BATCH, seq)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _of(module: str, name: str, *args: Any, inputs: Arguments | None = None, **kwargs: Any) -> Callable[[], Built]:
    """Returns a function that makes `module.name(*args, **kwargs)`, and calls it with `inputs`, or with images."""

    def made() -> Built:
        kind = getattr(importlib.import_module(module), name)
        return kind(*args, **kwargs), (images(),) if inputs is None else inputs

    return made


# ---- timm


def _timm(name: str, size: int = 32, **kwargs: Any) -> Callable[[], Built]:
    """Returns a function that makes a class of timm with ten classes."""
    return _of("timm.models", name, num_classes=10, inputs=(images(size),), **kwargs)


def _timm_named(name: str, size: int = 64, **kwargs: Any) -> Callable[[], Built]:
    return _of("timm", "create_model", name, num_classes=10, inputs=(images(size),), **kwargs)


def _timm_mixer(block: str, mlp: str) -> Callable[[], Built]:
    """Returns a function that makes a mixer of two blocks of a kind."""

    def made() -> Built:
        from timm.models import mlp_mixer

        blocks = {"block_layer": getattr(mlp_mixer, block), "mlp_layer": getattr(mlp_mixer, mlp)}
        model = mlp_mixer.MlpMixer(10, 32, patch_size=8, num_blocks=2, embed_dim=48, mlp_ratio=4, **blocks)
        return model, (images(),)

    return made


VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 6}
STAGES: dict[str, Any] = {"depths": (2, 1), "embed_dim": 24, "num_heads": (3, 6)}
CONVNEXT: dict[str, Any] = {"depths": (1, 2, 1, 1), "dims": (12, 24, 36, 48), "size": 64}
TIMM = {
    "vit": _timm("VisionTransformer", **VIT, drop_path_rate=0.1, proj_drop_rate=0.1),
    "vit-dynamic-size": _timm("VisionTransformer", **VIT, dynamic_img_size=True),
    "vit-registers-qk-norm": _timm(
        "VisionTransformer", **VIT, reg_tokens=2, qk_norm=True, init_values=0.1, global_pool="avg"
    ),
    "vit-attention-pool": _timm("VisionTransformer", **VIT, class_token=False, global_pool="map"),
    "vit-patch-drop": _timm("VisionTransformer", **VIT, patch_drop_rate=0.25),
    "vit-sam": _timm("VisionTransformerSAM", **VIT, use_rel_pos=True, window_size=2, neck_chans=16),
    "deit": _timm("VisionTransformerDistilled", **VIT),
    "beit": _timm("Beit", **VIT, use_rel_pos_bias=True, init_values=0.1),
    "eva": _timm("Eva", **VIT, use_rot_pos_emb=True, swiglu_mlp=True, scale_mlp=True),
    "cait": _timm("Cait", **VIT),
    "xcit": _timm("Xcit", **VIT, eta=1.0),
    "convit": _timm("ConVit", **VIT, local_up_to_layer=1),
    "tnt": _timm(
        "TNT", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads_outer=6, inner_dim=12, num_heads_inner=3
    ),
    "swin": _timm("SwinTransformer", img_size=32, patch_size=2, window_size=4, **STAGES),
    "swin-v2": _timm("SwinTransformerV2", img_size=32, patch_size=2, window_size=4, **STAGES),
    "mixer": _timm("MlpMixer", img_size=32, patch_size=8, num_blocks=2, embed_dim=48),
    "convnext": _timm("ConvNeXt", **CONVNEXT, drop_path_rate=0.1),
    "convnext-grn": _timm("ConvNeXt", **CONVNEXT, use_grn=True, conv_mlp=True),
    "metaformer": _timm("MetaFormer", depths=(1, 1, 1, 1), dims=(12, 24, 36, 48)),
    "pvt-v2": _timm(
        "PyramidVisionTransformerV2", depths=(1, 1, 1, 1), embed_dims=(12, 24, 36, 48), num_heads=(1, 2, 3, 6), size=64
    ),
    "hiera": _timm(
        "Hiera", img_size=(64, 64), embed_dim=12, stages=(1, 1, 1, 1), q_pool=2, mask_unit_size=(4, 4), size=64
    ),
    "davit": _timm("DaVit", embed_dims=(12, 24, 36, 48), num_heads=(3, 6, 6, 6), depths=(1, 1, 1, 1), size=64),
    "focalnet": _timm("FocalNet", embed_dim=12, depths=(1, 1, 1, 1), size=64),
    "volo": _timm(
        "VOLO", layers=[1, 1, 1, 1], img_size=64, stem_hidden_dim=12, embed_dims=[24, 24, 24, 24],
        num_heads=[3, 6, 6, 6], size=64,
    ),
    "gcvit": _timm(
        "GlobalContextVit", img_size=64, window_size=(2, 2, 2, 2), embed_dim=12, depths=(1, 1, 1, 1),
        num_heads=(2, 3, 6, 6), size=64,
    ),
    "twins": _timm(
        "Twins", img_size=64, embed_dims=(12, 24, 36, 48), num_heads=(1, 2, 3, 6), depths=(1, 1, 1, 1),
        wss=(4, 4, 2, 2), size=64,
    ),
    "nest": _timm(
        "Nest", img_size=32, patch_size=2, num_levels=2, embed_dims=(12, 24), num_heads=(3, 6), depths=(1, 1)
    ),
    "levit": _timm("Levit", img_size=64, embed_dim=(24, 48), key_dim=8, depth=(1, 1), num_heads=(3, 6), size=64),
    "pit": _timm(
        "PoolingVisionTransformer", img_size=32, patch_size=8, stride=4, base_dims=(8, 8, 8), depth=(1, 1, 1),
        heads=(3, 6, 6),
    ),
    **{name: _timm_named(f"test_{name}", 160) for name in ("coatnet", "maxvit", "vit3", "vit_relpos")},
    **{name: _timm_named(f"test_{name}") for name in (
        "byobnet", "convnext2", "efficientnet", "efficientnet_evos", "efficientnet_gn", "mambaout", "nfnet", "resnet",
    )},
    "gmlp": _timm_mixer("SpatialGatingBlock", "GatedMlp"),
    "resmlp": _timm_mixer("ResBlock", "Mlp"),
    "mobilenet-v3": _timm_named("mobilenetv3_small_050"),
    "densenet": _timm_named("densenet121", growth_rate=6, block_config=(2, 2)),
    "mobilevit": _timm_named("mobilevit_xxs"),
    "ghostnet": _timm_named("ghostnet_050"),
}  # fmt: skip

# ---- x-transformers


def _decoder(wrapper: dict[str, Any] | None = None, **layers: Any) -> Callable[[], Built]:
    """Returns a function that makes a language model of two layers of `Decoder`."""

    def made() -> Built:
        import x_transformers

        decoder = x_transformers.Decoder(**{"dim": 48, "depth": 2, "heads": 6, "attn_dim_head": 8} | layers)
        text = {"num_tokens": VOCAB, "max_seq_len": 16} | (wrapper or {})
        return x_transformers.TransformerWrapper(attn_layers=decoder, **text), (tokens(),)

    return made


def _autoregressive() -> Built:
    import x_transformers

    model, (x,) = _decoder(rotary_pos_emb=True)()
    return x_transformers.AutoregressiveWrapper(model), (x,)


def _image_encoder() -> Built:
    import x_transformers

    encoder = x_transformers.Encoder(dim=48, depth=2, heads=6, attn_dim_head=8)
    return x_transformers.ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=10, attn_layers=encoder
    ), (images(),)  # fmt: skip


def _encoder_decoder() -> Built:
    import x_transformers

    sizes = {
        f"{side}_{key}": value
        for side in ("enc", "dec")
        for key, value in {
            "num_tokens": VOCAB, "depth": 2, "heads": 6, "max_seq_len": 16, "attn_dim_head": 8,
        }.items()
    }  # fmt: skip
    return x_transformers.XTransformer(dim=48, **sizes), (tokens(), tokens())


def _continuous() -> Built:
    import x_transformers

    encoder = x_transformers.Encoder(dim=48, depth=2, heads=6, attn_dim_head=8)
    return x_transformers.ContinuousTransformerWrapper(
        dim_in=5, dim_out=7, max_seq_len=16, attn_layers=encoder
    ), (_random(BATCH, SEQ, 5),)  # fmt: skip


X_TRANSFORMERS = {
    "decoder": _decoder(),
    "rotary": _decoder(rotary_pos_emb=True),
    "alibi": _decoder(alibi_pos_bias=True, alibi_num_heads=3),
    "t5-bias": _decoder(rel_pos_bias=True),
    "dynamic-position-bias": _decoder(dynamic_pos_bias=True),
    "flash": _decoder(attn_flash=True),
    "grouped-keys": _decoder(attn_kv_heads=2, rotary_pos_emb=True),
    "one-key": _decoder(attn_one_kv_head=True),
    "glu": _decoder(ff_glu=True, ff_swish=True, use_rmsnorm=True),
    "relu-squared": _decoder(ff_relu_squared=True, use_scalenorm=True),
    "qk-norm": _decoder(attn_qk_norm=True, attn_qk_norm_dim_scale=True),
    "sandwich-norm": _decoder(sandwich_norm=True),
    "residual-attention": _decoder(residual_attn=True),
    "talking-heads": _decoder(attn_pre_talking_heads=True, attn_post_talking_heads=True),
    "sparse-topk": _decoder(attn_sparse_topk=4),
    "macaron": _decoder(macaron=True),
    "shifted-tokens": _decoder(shift_tokens=1),
    "memory-tokens": _decoder({"num_memory_tokens": 4}),
    "gated-residual": _decoder(gate_residual=True, attn_gate_values=True),
    "attention-on-attention": _decoder(attn_on_attn=True),
    "dropout": _decoder({"emb_dropout": 0.1}, attn_dropout=0.1, ff_dropout=0.1),
    "autoregressive": _autoregressive,
    "image-encoder": _image_encoder,
    "encoder-decoder": _encoder_decoder,
    "continuous": _continuous,
}

# ---- vit-pytorch


def _vit(module: str, name: str, inputs: Arguments | None = None, **kwargs: Any) -> Callable[[], Built]:
    return _of(f"vit_pytorch.{module}", name, inputs=inputs, num_classes=10, **kwargs)


PATCHES: dict[str, Any] = {"image_size": 32, "patch_size": 8, "dim": 48, "depth": 2, "heads": 6, "mlp_dim": 96}


VIT_PYTORCH = {
    "vit": _vit("vit", "ViT", **PATCHES, dropout=0.1, emb_dropout=0.1),
    "simple-vit": _vit("simple_vit", "SimpleViT", **PATCHES),
    "simple-vit-qk-norm": _vit("simple_vit_with_qk_norm", "SimpleViT", **PATCHES),
    "simple-vit-registers": _vit("simple_vit_with_register_tokens", "SimpleViT", **PATCHES),
    "simple-vit-fft": _vit("simple_vit_with_fft", "SimpleViT", **PATCHES, freq_patch_size=8),
    "deepvit": _vit("deepvit", "DeepViT", **PATCHES),
    "cait": _vit("cait", "CaiT", **PATCHES, cls_depth=1),
    "parallel-vit": _vit("parallel_vit", "ViT", **PATCHES),
    "patch-merger": _vit("vit_with_patch_merger", "ViT", **PATCHES, patch_merge_layer=1, patch_merge_num_tokens=4),
    "small-dataset": _vit("vit_for_small_dataset", "ViT", **PATCHES),
    "learnable-memory": _vit("learnable_memory_vit", "ViT", **PATCHES),
    "t2t": _vit("t2t", "T2TViT", image_size=32, dim=48, depth=2, heads=6, mlp_dim=96, t2t_layers=((7, 4), (3, 2))),
    "cct": _vit(
        "cct", "CCT", img_size=32, embedding_dim=48, n_conv_layers=1, num_layers=2, num_heads=6, mlp_ratio=2.0
    ),
    "levit": _vit("levit", "LeViT", image_size=64, dim=(24, 48), depth=1, heads=(3, 6), mlp_mult=2, stages=2,
                  inputs=(images(64),)),
    "cvt": _vit("cvt", "CvT", s1_emb_dim=12, s2_emb_dim=24, s3_emb_dim=48, s1_depth=1, s2_depth=1, s3_depth=1,
                s1_heads=1, s2_heads=3, s3_heads=6, inputs=(images(64),)),
    "twins": _vit("twins_svt", "TwinsSVT", s1_emb_dim=12, s2_emb_dim=24, s3_emb_dim=36, s4_emb_dim=48, s1_depth=1,
                  s2_depth=1, s3_depth=1, s4_depth=1, s1_local_patch_size=4, s2_local_patch_size=4,
                  s3_local_patch_size=2, s4_local_patch_size=2, s1_global_k=2, s2_global_k=2, s3_global_k=2,
                  s4_global_k=2, inputs=(images(64),)),
    "crossformer": _vit("crossformer", "CrossFormer", dim=(32, 48, 64, 96), depth=(1, 1, 1, 1),
                        global_window_size=(4, 2, 2, 1), local_window_size=2, inputs=(images(64),)),
    "maxvit": _vit("max_vit", "MaxViT", dim_conv_stem=12, dim=12, dim_head=4, depth=(1, 1), window_size=4,
                   inputs=(images(32),)),
    "nest": _vit("nest", "NesT", image_size=32, patch_size=2, dim=12, heads=3, num_hierarchies=2,
                 block_repeats=(1, 1)),
    "mobilevit": _vit("mobile_vit", "MobileViT", image_size=(64, 64), dims=[24, 36, 48],
                      channels=[8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 32], inputs=(images(64),)),
    "xcit": _vit("xcit", "XCiT", **PATCHES, cls_depth=1),
}  # fmt: skip

# ---- diffusers


def _diffusers(name: str, inputs: dict[str, Any], **kwargs: Any) -> Callable[[], Built]:
    return _of("diffusers", name, inputs=inputs | {"return_dict": False}, **kwargs)


TIMES, TEXT = torch.tensor([7, 400]), _random(BATCH, SEQ, 24)
LATENT: dict[str, Any] = {"hidden_states": images(8, 4), "timestep": TIMES}
HEADS: dict[str, Any] = {"num_layers": 2, "num_attention_heads": 6, "attention_head_dim": 8}
UNET: dict[str, Any] = {"sample_size": 8, "block_out_channels": (12, 24), "layers_per_block": 1, "norm_num_groups": 6}
DIFFUSERS = {
    "dit": _diffusers("DiTTransformer2DModel", LATENT | {"class_labels": torch.tensor([1, 3])}, **HEADS, sample_size=8,
                      in_channels=4, out_channels=8, num_embeds_ada_norm=9),
    "pixart": _diffusers("PixArtTransformer2DModel", LATENT | {
        "encoder_hidden_states": TEXT,
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }, **HEADS, sample_size=8, caption_channels=24, cross_attention_dim=48, use_additional_conditions=False),
    "sd3": _diffusers("SD3Transformer2DModel", LATENT | {
        "encoder_hidden_states": TEXT, "pooled_projections": _random(BATCH, 20),
    }, **HEADS, sample_size=8, in_channels=4, out_channels=4, joint_attention_dim=24, caption_projection_dim=48,
        pooled_projection_dim=20, pos_embed_max_size=8),
    "flux": _diffusers("FluxTransformer2DModel", {
        "hidden_states": _random(BATCH, 16, 4), "encoder_hidden_states": TEXT, "pooled_projections": _random(BATCH, 20),
        "timestep": torch.tensor([0.1, 0.7]), "img_ids": torch.arange(48.0).view(16, 3) % 4,
        "txt_ids": torch.zeros(SEQ, 3),
    }, in_channels=4, num_layers=1, num_single_layers=2, num_attention_heads=6, attention_head_dim=8,
        joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=(2, 2, 4)),
    "unet-2d-condition": _diffusers("UNet2DConditionModel", {
        "sample": images(8, 4), "timestep": TIMES, "encoder_hidden_states": TEXT,
    }, **UNET, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=24, attention_head_dim=6),
    "unet-2d": _diffusers("UNet2DModel", {"sample": images(8), "timestep": TIMES}, **UNET, attention_head_dim=6,
                          down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                          up_block_types=("AttnUpBlock2D", "UpBlock2D")),
    "controlnet": _diffusers("ControlNetModel", {
        "sample": images(8, 4), "timestep": TIMES, "encoder_hidden_states": TEXT, "controlnet_cond": images(16),
    }, block_out_channels=(12, 24), layers_per_block=1, norm_num_groups=6, cross_attention_dim=24,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=6,
        conditioning_embedding_out_channels=(8, 16)),
    "autoencoder": _diffusers("AutoencoderKL", {"sample": images(16)}, block_out_channels=(12, 24), norm_num_groups=6,
                              down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
    "prior": _diffusers("PriorTransformer", {
        "hidden_states": _random(BATCH, 20), "timestep": TIMES, "proj_embedding": _random(BATCH, 20),
        "encoder_hidden_states": _random(BATCH, 7, 20),
    }, **HEADS, embedding_dim=20, num_embeddings=7, additional_embeddings=4),
}  # fmt: skip

# ---- open_clip

TOWERS: dict[str, Any] = {
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 48, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": SEQ, "vocab_size": VOCAB, "width": 48, "heads": 6, "layers": 2},
}


def _clip(name: str, more: dict[str, Any] | None = None, **kwargs: Any) -> Callable[[], Built]:
    """Returns a function that makes a class of open_clip; `more` adds to the configuration of a tower."""
    towers = {key: value | (more or {}).get(key, {}) for key, value in TOWERS.items()} | kwargs
    return _of("open_clip.model" if name != "CoCa" else "open_clip", name, 48, inputs=(images(), tokens()), **towers)


def _coca() -> Built:
    """Returns a CoCa; its constructor leaves a parameter of the decoder without values."""
    model, inputs = _clip("CoCa", {
        "vision_cfg": {"attentional_pool": True, "attn_pooler_heads": 6, "output_tokens": True},
        "text_cfg": {"embed_cls": True, "output_tokens": True},
    }, multimodal_cfg={"context_length": SEQ, "width": 48, "heads": 6, "layers": 2})()  # fmt: skip
    nn.init.normal_(model.text_decoder.text_projection)  # type: ignore[union-attr, arg-type]
    return model, inputs


OPEN_CLIP = {
    "clip": _clip("CLIP"),
    "clip-quick-gelu": _clip("CLIP", quick_gelu=True, init_logit_bias=-10.0),
    "clip-resnet": _clip("CLIP", {"vision_cfg": {"layers": [1, 1, 1, 1], "width": 12}}),
    "clip-timm": _clip("CustomTextCLIP", {
        "vision_cfg": {"timm_model_name": "test_resnet", "timm_pool": "avg", "timm_proj": "linear", "image_size": 32},
    }),
    "coca": _coca,
}  # fmt: skip

# ---- sentence-transformers


def _sentences(pooling: str, dense: bool = False) -> Callable[[], Built]:
    """Returns a function that makes a BERT of two layers with a pooling, and perhaps a dense layer."""

    def made() -> Built:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Dense, Normalize, Pooling
        from transformers import BertConfig, BertModel

        class Words(nn.Module):
            """As `models.Transformer`, without a tokenizer, which would be read from a folder."""

            def __init__(self) -> None:
                super().__init__()
                self.auto_model = BertModel(BertConfig(
                    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=96,
                    max_position_embeddings=16,
                ))  # fmt: skip

            def forward(self, features: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
                found = self.auto_model(features["input_ids"], attention_mask=features["attention_mask"])
                features["token_embeddings"] = found[0]
                return features

        layers = [Dense(48, 24)] if dense else []
        model = SentenceTransformer(modules=[Words(), Pooling(48, pooling_mode=pooling), *layers, Normalize()])
        mask = torch.ones(BATCH, SEQ, dtype=torch.long)
        mask[1, -2:] = 0
        return model, ({"input_ids": tokens(), "attention_mask": mask},)

    return made


SENTENCES = {
    "mean": _sentences("mean"),
    "cls-dense": _sentences("cls", dense=True),
    "max": _sentences("max"),
    "weighted-mean": _sentences("weightedmean"),
}

# ---- torchvision


def _torchvision(name: str, size: int = 64, **kwargs: Any) -> Callable[[], Built]:
    return _of("torchvision.models", name, num_classes=10, inputs=(images(size),), **kwargs)


SWIN: dict[str, Any] = {
    "patch_size": [2, 2],
    "embed_dim": 24,
    "depths": [2, 1],
    "num_heads": [3, 6],
    "window_size": [4, 4],
}


def _torchvision_swin_v2() -> Built:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    return SwinTransformer(
        **SWIN, num_classes=10, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2
    ), (images(),)  # fmt: skip


def _resnext() -> Built:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, groups=6, width_per_group=4), (images(64),)


def _torchvision_convnext() -> Built:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(12, 24, 1), CNBlockConfig(24, None, 2)], num_classes=10), (images(),)


TORCHVISION = {
    "vit": _torchvision(
        "VisionTransformer", 32, image_size=32, patch_size=8, num_layers=2, num_heads=6, hidden_dim=48, mlp_dim=96,
        dropout=0.1,
    ),
    "swin": _torchvision("SwinTransformer", 32, **SWIN),
    "swin-v2": _torchvision_swin_v2,
    "convnext": _torchvision_convnext,
    "maxvit": _torchvision(
        "MaxVit", input_size=(64, 64), stem_channels=12, partition_size=4, block_channels=[12, 24], block_layers=[1, 1],
        head_dim=4, stochastic_depth_prob=0.1,
    ),
    "resnet18": _torchvision("resnet18", width_per_group=64),
    "resnext": _resnext,
    "mobilenet-v2": _torchvision("mobilenet_v2", width_mult=0.25),
    "densenet": _torchvision("DenseNet", growth_rate=6, block_config=(2, 2), num_init_features=12),
    "efficientnet": _torchvision("efficientnet_b0"),
    "regnet": _torchvision("regnet_y_400mf"),
}  # fmt: skip

# ---- torchtitan, torch


def _titan() -> Built:
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs

    sizes = TransformerModelArgs(
        dim=48, n_layers=2, n_heads=6, n_kv_heads=2, vocab_size=VOCAB, max_seq_len=16, multiple_of=8
    )
    model: nn.Module = Transformer(sizes)
    with torch.no_grad():
        model.init_weights()  # type: ignore[operator]
    return model, (tokens(),)


TORCH_SIZES: dict[str, Any] = {"d_model": 48, "nhead": 6, "dim_feedforward": 96, "batch_first": True}
X, Y = _random(BATCH, SEQ, 48), _random(BATCH, 5, 48)


def _stack(side: str, **kwargs: Any) -> nn.Module:
    layer = getattr(nn, f"Transformer{side}Layer")(**TORCH_SIZES, **kwargs)
    more = {"enable_nested_tensor": False} if side == "Encoder" else {}
    return getattr(nn, f"Transformer{side}")(layer, 2, **more)


TORCH: dict[str, Callable[[], Built]] = {
    "transformer": lambda: (nn.Transformer(**TORCH_SIZES, num_encoder_layers=2, num_decoder_layers=2), (X, Y)),
    "transformer-masks": lambda: (
        nn.Transformer(**TORCH_SIZES, num_encoder_layers=2, num_decoder_layers=2, activation="gelu"),
        {"src": X, "tgt": Y, "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5), "tgt_is_causal": True,
         "src_key_padding_mask": torch.arange(SEQ).expand(BATCH, SEQ) > 5},
    ),
    "encoder": lambda: (_stack("Encoder", dropout=0.0, activation="gelu"), (X,)),
    "encoder-padding": lambda: (
        _stack("Encoder"), {"src": X, "src_key_padding_mask": torch.arange(SEQ).expand(BATCH, SEQ) > 5}
    ),
    "decoder": lambda: (_stack("Decoder", norm_first=True), (Y, X)),
    "attention": lambda: (nn.MultiheadAttention(48, 6, batch_first=True), (X, X, X)),
}  # fmt: skip

LIBRARIES = {
    "timm": TIMM, "x-transformers": X_TRANSFORMERS, "vit-pytorch": VIT_PYTORCH, "diffusers": DIFFUSERS,
    "open_clip": OPEN_CLIP, "sentence-transformers": SENTENCES, "torchvision": TORCHVISION,
    "torchtitan": {"llama3": _titan}, "torch": TORCH,
}  # fmt: skip
MODULES = {"open_clip": "open_clip"} | {name: name.replace("-", "_") for name in LIBRARIES}
"""Each library -> the module that is imported."""

MODELS = {f"{library}/{name}": made for library, models in LIBRARIES.items() for name, made in models.items()}


def built(name: str) -> Built:
    """Returns the model of a name, and the arguments of a call."""
    return MODELS[name]()

"""Whether the screen passes common networks, and which operators they have, before and after run_decompositions().

python -m tests.bench.networks [--only REGEX] [--write]

Exports networks of torchvision, timm and transformers with random weights, screens each .pt2 as the server does, and prints a
line for each. timm and transformers are not among etfarm's dependencies: `pip install timm transformers`. `--write`, which needs
them, keeps the operators in tests/support/operators_seen.txt, which a test compares with the server's list. Takes about an hour
on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from etfarm.server.compile.screening import screen
from etfarm.wire.errors import UserError
from tests.support.torchvision import torchvision_models

SEEN: Final = Path(__file__).parents[1] / "support" / "operators_seen.txt"
MAX_PARAMETERS: Final = 200_000_000

Network = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]
"""A module, and the arguments to export it with."""

CLASSIFIERS: Final = (
    "alexnet vgg11_bn resnet18 resnext50_32x4d squeezenet1_1 mobilenet_v2 mobilenet_v3_small efficientnet_b0 "
    "efficientnet_v2_s shufflenet_v2_x1_0 mnasnet0_5 densenet121 googlenet inception_v3 regnet_y_400mf convnext_tiny vit_b_16 "
    "swin_t swin_v2_t maxvit_t"
)
SEGMENTERS: Final = "fcn_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large"
VIDEO: Final = "r3d_18 mc3_18 s3d mvit_v2_s swin3d_t"
TIMM: Final = (
    "resnet18d resnetv2_50 resnest14d seresnet18 skresnet18 res2net50_14w_8s ecaresnet26t cspresnet50 darknet53 dla34 dpn68 "
    "efficientnet_lite0 tf_efficientnetv2_b0 mixnet_s mobilenetv4_conv_small mobilenetv4_hybrid_medium fbnetc_100 "
    "ghostnet_100 ghostnetv2_100 hardcorenas_a hrnet_w18_small lcnet_050 mobileone_s0 repvgg_a0 regnetx_002 rexnet_100 "
    "tinynet_e vovnet39a nf_regnet_b0 inception_v4 inception_resnet_v2 xception41 selecsls42b senet154 nasnetalarge "
    "pnasnet5large gernet_s haloregnetz_b bat_resnext26ts botnet26t_256 lambda_resnet26t convnext_atto convnextv2_atto "
    "convmixer_768_32 edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientvit_b0 efficientvit_m0 fastvit_t8 "
    "fastvit_mci0 inception_next_tiny poolformer_s12 caformer_s18 mobilevit_xxs mobilevitv2_050 pvt_v2_b0 repvit_m0_9 "
    "repghostnet_050 starnet_s1 tiny_vit_5m_224 vit_tiny_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 "
    "beit_base_patch16_224 beitv2_base_patch16_224 cait_xxs24_224 coat_tiny coatnet_0_rw_224 convit_tiny crossvit_tiny_240 "
    "davit_tiny eva02_tiny_patch14_224 focalnet_tiny_srf gcvit_xxtiny hgnet_tiny hgnetv2_b0 hiera_tiny_224 hieradet_small "
    "levit_128s levit_conv_128s maxvit_rmlp_pico_rw_256 maxxvit_rmlp_nano_rw_256 mixer_s32_224 gmixer_12_224 resmlp_12_224 "
    "gmlp_ti16_224 mvitv2_tiny nest_tiny nextvit_small pit_xs_224 pit_ti_distilled_224 rdnet_tiny sequencer2d_s shvit_s1 "
    "swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 tnt_s_patch16_224 tresnet_m "
    "twins_pcpvt_small twins_svt_small visformer_tiny vitamin_small_224 volo_d1_224 xcit_nano_12_p8_224 visformer_small "
    "aimv2_large_patch14_224 samvit_base_patch16 naflexvit_base_patch16_gap mambaout_femto csatv2 lsnet_t "
    "vit_small_patch16_dinov3 lowformer_b0"
)
ENCODERS: Final = (
    "Bert Roberta Electra Albert XLMRoberta MobileBert DebertaV2 Deberta BigBird RoFormer MPNet ConvBert Nystromformer "
    "MegatronBert Ernie Camembert XLMRobertaXL Splinter NomicBert"
)
DECODERS: Final = (
    "Llama Qwen2 Qwen3 Mistral Gemma Gemma2 Phi Phi3 StableLm Olmo Olmo2 Cohere GPTNeoX Persimmon Starcoder2 SmolLM3 "
    "Granite Mamba FalconMamba Glm Nemotron Exaone4 Lfm2 Helium Arcee XGLM"
)
VISION: Final = (
    "ViT DeiT Beit Dinov2 Data2VecVision ViTMSN Swin ConvNext ConvNextV2 ResNet RegNet MobileNetV1 MobileNetV2 MobileViT "
    "MobileViTV2 Segformer PoolFormer Pvt PvtV2 Cvt FocalNet Levit Bit DPT GLPN SiglipVision CLIPVision Hiera "
    "Dinov2WithRegisters IJepa DINOv3ViT"
)
AUDIO: Final = "Wav2Vec2 Hubert WavLM UniSpeech Data2VecAudio"
SMALL: Final = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
"""A transformer of this size has every operator of the large one."""
WORDS: Final = {**SMALL, "vocab_size": 200}


class First(torch.nn.Module):
    """The first output of a model of transformers, by the names of its inputs."""

    def __init__(self, model: torch.nn.Module, *names: str) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        values = dict(zip(self.names, args, strict=True))
        cached = {"use_cache": False} if "input_ids" in values and hasattr(self.model.config, "use_cache") else {}
        return self.model(**values, **cached)[0]


def networks() -> Iterator[tuple[str, Callable[[], Network]]]:
    """Names, and what makes each network."""
    yield from _torchvision()
    yield from ((f"timm {name}", lambda name=name: _timm(name)) for name in TIMM.split())
    yield from _transformers()


def _torchvision() -> Iterator[tuple[str, Callable[[], Network]]]:
    models = torchvision_models()

    def image(size: int) -> tuple[torch.Tensor]:
        return (torch.zeros(1, 3, size, size),)

    for name in CLASSIFIERS.split():
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        size = 299 if name == "inception_v3" else 224
        yield f"torchvision {name}", lambda name=name, o=options, s=size: (getattr(models, name)(weights=None, **o), image(s), {})
    for name in SEGMENTERS.split():
        make = getattr(models.segmentation, name)
        yield f"torchvision {name}", lambda make=make: (make(weights=None, weights_backbone=None), image(224), {})
    for name in VIDEO.split():
        make = getattr(models.video, name)
        yield f"torchvision {name}", lambda make=make: (make(weights=None), (torch.zeros(1, 3, 16, 224, 224),), {})
    pair = (torch.zeros(1, 3, 128, 128), torch.zeros(1, 3, 128, 128))
    yield "torchvision raft_small", lambda: (models.optical_flow.raft_small(weights=None), pair, {})


def _timm(name: str) -> Network:
    import timm

    model = timm.create_model(name, pretrained=False)
    return model, (torch.zeros(1, *model.pretrained_cfg.get("input_size", (3, 224, 224))),), {}


def _transformers() -> Iterator[tuple[str, Callable[[], Network]]]:
    def of(name: str, *names: str, **config: Any) -> torch.nn.Module:
        import transformers

        created = getattr(transformers, f"{name}Config")(**config)
        return First(getattr(transformers, f"{name}Model")(created), *names)

    ids = torch.ones(1, 16, dtype=torch.long)
    for name in ENCODERS.split():
        yield f"transformers {name}", lambda name=name: (of(name, "input_ids", **WORDS), (ids,), {})
    for name in DECODERS.split():
        heads = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
        yield f"transformers {name}", lambda name=name, h=heads: (of(name, "input_ids", **WORDS, **h), (ids,), {})
    gpt = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 200}
    yield "transformers GPT2", lambda: (of("GPT2", "input_ids", **gpt), (ids,), {})
    t5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 200}
    yield "transformers T5", lambda: (of("T5", "input_ids", "decoder_input_ids", **t5), (ids, ids), {})
    whisper = {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 200, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    sound = torch.zeros(1, 80, 3000)
    yield "transformers Whisper", lambda: (of("Whisper", "input_features", "decoder_input_ids", **whisper), (sound, ids), {})
    for name in VISION.split():
        config = SMALL if name.startswith(("ViT", "DeiT", "Beit", "Dino", "DINO", "Data2", "DPT", "Siglip", "CLIP", "IJ")) else {}
        yield f"transformers {name}", lambda name=name, c=config: _seeing(of(name, "pixel_values", **c))
    for name in AUDIO.split():
        yield f"transformers {name}", lambda name=name: (of(name, "input_values", **SMALL), (torch.zeros(1, 16_000),), {})
    eyes = {
        "text_config": {**WORDS, "max_position_embeddings": 32},
        "vision_config": {**SMALL, "image_size": 64, "patch_size": 16},
    }
    picture = torch.zeros(1, 3, 64, 64)
    for name in ("CLIP", "Siglip"):
        yield f"transformers {name}", lambda name=name: (of(name, "input_ids", "pixel_values", **eyes), (ids, picture), {})


def _seeing(model: torch.nn.Module) -> Network:
    size = getattr(model.model.config, "image_size", 224)
    return model, (torch.zeros(1, 3, *((size, size) if isinstance(size, int) else size)),), {}


def operators(program: Any) -> set[str]:
    """Return an exported program's operators, as the server's list names them, those of its branches included."""
    result = set()
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.op == "call_function":
                name = str(node.target)
                is_higher_order = isinstance(node.target, torch._ops.HigherOrderOperator)
                is_own = isinstance(node.target, torch._ops.OpOverload)
                result.add(f"higher_order.{name}" if is_higher_order else name if is_own else _python(node.target))
    return result


def _python(function: Any) -> str:
    module = function.__module__
    return f"{module if module in ('_operator', 'math') else 'torch'}.{function.__name__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="networks whose names it is found in")
    parser.add_argument("--write", action="store_true", help="write the operators' file")
    arguments = parser.parse_args()
    if arguments.write and (missing := [name for name in ("timm", "transformers") if find_spec(name) is None]):
        parser.error(f"--write needs all networks: pip install {' '.join(missing)}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    seen: set[str] = set()
    passed = refused = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.pt2"
        for name, make in networks():
            if not re.search(arguments.only, name):
                continue
            started = time.monotonic()
            try:
                torch.manual_seed(0)
                module, args, kwargs = make()
                if sum(one.numel() for one in module.parameters()) > MAX_PARAMETERS:
                    raise ValueError("too large")
                with torch.no_grad():
                    program = torch.export.export(module.eval(), args, kwargs)
                core = program.run_decompositions()
            except Exception as error:  # noqa: BLE001 - what torch cannot export says nothing of the screen
                print(f"{name:50} not exported: {str(error).strip().splitlines()[0][:100]}", flush=True)
                continue
            try:
                for one in (program, core):
                    torch.export.save(one, path)
                    screen.screen_pt2(path)
                seen |= operators(program) | operators(core)
                passed += 1
                print(f"{name:50} passes  {len(operators(program)):3} operators  {time.monotonic() - started:4.0f} s", flush=True)
            except UserError as error:
                refused += 1
                print(f"{name:50} REFUSED {error}", flush=True)
    print(f"{passed} pass, {refused} are refused; {len(seen)} operators")
    if arguments.write:
        header = (
            f"# {len(seen)} operators of {passed} networks of torchvision, timm and transformers; see tests/bench/networks.py."
        )
        SEEN.write_text("\n".join([header, *sorted(seen), ""]))
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())

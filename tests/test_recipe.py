from __future__ import annotations

import subprocess
import sys
from operator import ne
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import moexp.config.recipe
from moexp.base.errors import MoexpError
from moexp.base.yamlio import dump_yaml, parse_yaml
from moexp.config.recipe import Recipe, find_recipe, list_recipes, load_recipe, nearest_key, valid_keys
from moexp.data.public_sets import BENCHMARKS

HUB = [
    "deepseek-v3.1", "ds-v2-lite", "gpt-oss-120b", "gpt-oss-20b", "mixtral-8x7b", "moonlight-16b-a3b", "olmoe-1b-7b",
    "qwen3-235b-a22b", "qwen3-30b-a3b",
]  # fmt: skip
SHIPPED = sorted([
    *HUB, "pocket", "pocket-deepseek-v3", "pocket-eagle3", "pocket-gpt-oss", "pocket-gto", "pocket-long", "pocket-mtp",
    "pocket-quick", "pocket-qwen3", "pocket-qwen3-wide", "pocket-repair", "tiny",
    "workloads-draftexpert", "workloads-ecospec",
])  # fmt: skip

ON_BENCHMARKS = ("workloads-draftexpert", "workloads-ecospec")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def test_every_shipped_recipe_is_listed_with_a_line_that_fits_a_terminal():
    infos = list_recipes()
    assert [info.name for info in infos] == SHIPPED
    assert all(0 < len(info.summary) <= 80 - 2 - max(map(len, SHIPPED)) and "\n" not in info.summary for info in infos)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_resolved_yaml_of_a_recipe_loads_as_the_same_recipe(name: str, tmp_path: Path):
    recipe = load_recipe(name)
    again = load_recipe(write(tmp_path, "another-name", recipe.resolved_yaml()))
    assert again == recipe
    assert again.name == name  # not the file's name: results of a resumed run stay where they are


@pytest.mark.parametrize("name", SHIPPED)
def test_the_workloads_of_a_shipped_recipe_are_embedded_or_benchmarks(name: str):
    folder = Path(moexp.__file__).parent / "data" / "workloads"
    known = {file.stem for file in folder.glob("*.jsonl")} | (set(BENCHMARKS) if name in ON_BENCHMARKS else set())
    assert set(load_recipe(name).bench.workloads) <= known


def test_a_recipe_is_found_by_name_with_or_without_extension_and_by_path(tmp_path: Path, monkeypatch):
    assert find_recipe("pocket") == find_recipe("pocket.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pocket").mkdir()  # a folder of that name must not hide the recipe
    assert load_recipe("pocket").name == "pocket"
    write(tmp_path, "pocket", "seed: 7")
    assert load_recipe("pocket.yaml").seed == 7


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(MoexpError, match="did you mean pocket-quick"):
        load_recipe("pocket-quik")
    with pytest.raises(MoexpError, match="no recipe"):
        load_recipe("nowhere/pocket")


def test_recipes_are_found_in_an_installed_wheel(tmp_path: Path, monkeypatch):
    package = tmp_path / "site-packages" / "moexp"
    (package / "_recipes").mkdir(parents=True)
    write(package / "_recipes", "only", "summary: from the wheel")
    foreign = tmp_path / "site-packages" / "recipes"  # some other distribution's folder
    foreign.mkdir()
    write(foreign, "foreign", "summary: not ours")
    monkeypatch.setattr(moexp, "__file__", str(package / "__init__.py"))
    assert [info.name for info in list_recipes()] == ["only"]


# --- inheritance ---


def test_base_merges_sections_and_replaces_everything_else(tmp_path: Path):
    write(
        tmp_path,
        "parent",
        """
        name: parent
        summary: the parent
        draft: {width: 8, lr: 0.5}
        tune: {tau: [0.1, 0.2]}
        """,
    )
    child = write(
        tmp_path,
        "child",
        """
        base: parent.yaml
        draft: {width: 16}
        tune: {tau: [0.9]}
        """,
    )
    recipe = load_recipe(child)
    assert (recipe.draft.width, recipe.draft.lr) == (16, 0.5)
    assert recipe.tune.tau == (0.9,)
    assert (recipe.name, recipe.summary) == ("child", "")


def test_base_may_be_a_shipped_name_and_may_go_on_for_generations(tmp_path: Path):
    write(tmp_path, "one", "base: tiny\nseed: 1")
    write(tmp_path, "two", "base: one.yaml\ndraft: {steps: 2}")
    recipe = load_recipe(write(tmp_path, "three", "base: two.yaml"))
    assert (recipe.target.kind, recipe.seed, recipe.draft.steps, recipe.name) == ("tiny", 1, 2, "three")


def test_a_circle_of_bases_is_an_error(tmp_path: Path):
    write(tmp_path, "a", "base: b.yaml")
    with pytest.raises(MoexpError, match=r"a\.yaml -> b\.yaml -> a\.yaml"):
        load_recipe(write(tmp_path, "b", "base: a.yaml").with_name("a.yaml"))
    with pytest.raises(MoexpError, match="as base"):
        load_recipe(write(tmp_path, "self", "base: self.yaml"))


def test_a_section_can_be_switched_on_over_a_base_that_has_none(tmp_path: Path):
    write(tmp_path, "off", "store: {pace: null}")
    path = write(tmp_path, "on", "base: off.yaml\nstore: {pace: {bandwidth_gb_s: 16}}")
    on = load_recipe(path)
    assert on.store.pace is not None and on.store.pace.bandwidth_gb_s == 16.0
    assert load_recipe(path, ["store.pace=null"]).store.pace is None


# --- overrides ---


def test_overrides_are_applied_in_order_and_parsed_as_yaml():
    recipe = load_recipe("tiny", ["draft.lr=1e-4", "draft.lr=2e-4", "decode.budget=cache", "bench.workloads=[chat]"])
    assert recipe.draft.lr == 2e-4
    assert recipe.decode.budget == "cache"
    assert recipe.bench.workloads == ("chat",)
    assert load_recipe("tiny", ["draft.token={weight: 3}"]).draft.token.weight == 3.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("draft.widht=3", "unknown key draft.widht .*nearest is draft.width"),
        ("temprature=1", "nearest is decode.temperature"),
        ("drafts.steps=3", "unknown key drafts .*nearest is draft"),
        ("draft.token={wieght: 3}", "unknown key draft.token.wieght .*nearest is draft.token.weight"),
        ("seed.x=1", "unknown key seed.x .*nearest is seed"),
        ("draft.width='3'", 'bad value for draft.width: "3" .*valid: a valid integer'),
        ("draft.width=0", "bad value for draft.width: 0 .*greater than 0"),
        ("draft.width=1.5", "bad value for draft.width"),
        ("draft=3", "bad value for draft: 3 .*a mapping"),
        ("decode.budget=all", "bad value for decode.budget: .*a valid integer or 'cache'"),
        ("decode.prefetch=yes", 'bad value for decode.prefetch: "yes"'),
        ("decode.drafter=eagle", "'ar', 'top-r', 'draft-expert', 'head' or 'target'"),
        ("bench.workloads=[chat, 3]", "bad value for bench.workloads: 3"),
        ("store.pace.latency_us=3", "missing value for store.pace.bandwidth_gb_s"),
        ("target.carve.top_k=65", "top_k .65. is larger than routed_experts .64."),
        ("target.source=hub", "bad value for target"),
        ("draft.width", "valid: section.key=value"),
        (".width=3", "valid: section.key=value"),
        ("draft.width=[", "not valid YAML"),
        ("base=pocket", "base cannot be overridden"),
    ],
)
def test_a_bad_override_is_one_line_that_names_the_key_and_what_is_valid(override: str, message: str):
    recipe = "tiny" if override != "target.source=hub" else "pocket"
    with pytest.raises(MoexpError, match=message) as caught:
        load_recipe(recipe, [override])
    assert "\n" not in str(caught.value)
    assert "--set" in str(caught.value)


def test_an_unknown_key_names_the_file_it_stands_in_even_in_a_base(tmp_path: Path):
    write(tmp_path, "parent", "draft: {stpes: 3}")
    with pytest.raises(MoexpError, match=r"unknown key draft.stpes \(.*parent.yaml\).*draft.steps"):
        load_recipe(write(tmp_path, "child", "base: parent.yaml\ndraft: {steps: 4}"))


def test_a_bad_value_names_the_source_that_set_it(tmp_path: Path):
    write(tmp_path, "parent", "draft: {width: -1}")
    with pytest.raises(MoexpError, match=r"draft.width: -1 \(.*parent.yaml\)"):
        load_recipe(write(tmp_path, "child", "base: parent.yaml\ndraft: {lr: 0.1}"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b", "must be a mapping"),
        ("seed: 1\nseed: 2", "duplicate key 'seed' .*line 2"),
        ("draft: {width: 3", "not valid YAML: .*line"),
        ("base: [tiny]", "bad value for base"),
        ("1: 2", "unknown key 1"),
        ("draft:", "bad value for draft: null"),
        ("name: ../escape", "bad value for name"),
    ],
)
def test_a_broken_file_is_an_error(text: str, message: str, tmp_path: Path):
    with pytest.raises(MoexpError, match=message):
        load_recipe(write(tmp_path, "broken", text))


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MoexpError, match="UTF-8"):
        load_recipe(path)


@given(st.sampled_from(valid_keys()), st.integers(min_value=0), st.sampled_from("abcdefghijklmnopqrstuvwxyz"))
def test_a_key_with_one_wrong_letter_is_still_recognised(key: str, position: int, letter: str):
    place = position % len(key)
    wrong = key[:place] + letter + key[place + 1 :]
    assume(len(key.rsplit(".", 1)[-1]) >= 5 and key[place] != "." and wrong not in valid_keys())
    as_near = [other for other in valid_keys() if len(other) == len(wrong) and sum(map(ne, other, wrong)) == 1]
    assume(as_near == [key])  # or nobody could say which of them was meant
    assert nearest_key(wrong).rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]


# --- digests and immutability ---


def test_a_digest_depends_on_its_sections_alone():
    one, other = load_recipe("pocket"), load_recipe("pocket", ["draft.width=512"])
    assert one.digest("target", "seed") == other.digest("seed", "target")
    assert one.digest("draft") != other.digest("draft")
    assert one.digest("target.carve") != one.digest("target.corpus")
    assert len(one.digest("draft")) == 12
    with pytest.raises(AssertionError):
        one.digest("nonsense")


def test_a_digest_is_the_same_in_another_process():
    script = "from moexp.config.recipe import load_recipe; print(load_recipe('pocket').digest('target', 'draft'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == load_recipe("pocket").digest("target", "draft")


def test_a_recipe_cannot_be_changed():
    recipe = load_recipe("tiny")
    with pytest.raises(ValueError, match="frozen"):
        recipe.draft.width = 3
    assert isinstance(recipe, Recipe)


# --- YAML ---


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("2.5E+2", 250.0),
        (".5", 0.5),
        ("12_000", 12000),
        ("-3", -3),
        ("007", "007"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("none", "none"),
        ("null", None),
        ("~", None),
        ("2020-01-02", "2020-01-02"),
    ],
)
def test_scalars_are_read_as_people_mean_them(text: str, value: object):
    assert parse_yaml(text, where="test") == value


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=10,
    )
)
def test_what_is_dumped_is_read_back_the_same(value: object):
    again = parse_yaml(dump_yaml(value), where="test")
    assert again == value and repr(again) == repr(value)


def test_a_revision_that_looks_like_a_number_stays_a_string(tmp_path: Path):
    revision = "12e4567"  # a short commit hash; plain YAML 1.1 would write it unquoted
    recipe = load_recipe("pocket", [f"target.revision='{revision}'"])
    assert load_recipe(write(tmp_path, "copy", recipe.resolved_yaml())).target.revision == revision
    assert yaml.safe_load(recipe.resolved_yaml())["target"]["revision"] == revision

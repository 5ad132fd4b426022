"""Settings of JAX while the tests run, here and in the processes that they start; checks of the shapes in signatures.

Nearly all of the time would be compilation: programs are compiled with few optimizations, and kept for the other
workers and the next time. `make test-all` compiles them as they are used.
"""

import gc
import importlib.metadata
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).resolve().parent / ".jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # programs without the lines that made each of their operations
}
QUICK_COMPILATION = (
    "--xla_cpu_use_fusion_emitters=false "  # a gradient compiles four times as fast so
    "--xla_cpu_parallel_codegen_split_count=1"  # saves a quarter of the rest: small programs are not divided
)

os.environ.update(SETTINGS | os.environ)  # before JAX is imported, which reads them then
os.environ["WANDB_MODE"] = "disabled"  # whoever is logged in
is_known = importlib.metadata.version("jaxlib").startswith("0.10.")  # XLA ends the process for flags that it has not
if is_known and os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
    os.environ["XLA_FLAGS"] = f"{QUICK_COMPILATION} {os.environ.get('XLA_FLAGS', '')}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it

CORE = "core.advantages core.objectives core.terms.ratios core.sampler extras.members utils.batching"
MODELS = "models.attention models.decoder models.deltanet models.distribution models.experts models.rotary"
install_import_hook([*CORE.split(), *MODELS.split()], "beartype.beartype")


# Files that take longest: workers take whole files, and these first, so that all end together.
LONG = """pages envs model resume lora turns combinations loading scoring speed seed_commands ahead sampling tools
distill meshes learner objectives hosts"""


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Drops the programs of a file at its end: each maps memory, and Linux ends a process with 65,530 mappings."""
    yield
    jax.clear_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the long files first, and what needs a browser into `make test-all`."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG.split())
    for item in items:
        if "chromium" in item.fixturenames:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leaves what imports and collection made out of each collection of garbage, and makes those rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compiles as usual, for a test that computes much or looks at what is compiled."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium; where it, its chromedriver or selenium is missing, the test is skipped."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("there is no Chromium, or no chromedriver (apt-get install chromium chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    yield browser
    browser.quit()

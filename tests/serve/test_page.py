"""The chat page in a browser: answers stream, Stop cancels, the conversation is kept, and nothing is asked of any other host."""

import json
import shutil
from collections.abc import Iterator

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from tests.serve.conftest import serving
from tests.serve.test_clients import Slow, wait_until

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    """A headless Chromium that finds no host but this one, and notes what it asks for."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for switch in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "no-proxy-server", "disable-gpu"):
        options.add_argument(f"--{switch}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as browser:
        yield browser


def asked_for(browser: webdriver.Chrome) -> list[str]:
    """The addresses of all requests since the last call."""
    entries = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"]


def test_the_page_needs_no_network_but_its_server(server):
    """It names no other address, and the browser is told to load nothing else."""
    response = httpx.get(server[0])
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    assert "http://" not in response.text and "https://" not in response.text and "//cdn" not in response.text


@pytest.mark.full("a browser")
@pytest.mark.skipif(None in (BROWSER, DRIVER), reason="needs Chromium: apt-get install chromium chromium-driver")
def test_a_conversation_in_a_browser(browser):
    """The text grows with each token; after Stop the engine has nothing to do; the next question has the first and its answer
    before it, and none of them after a new conversation has begun."""
    runner = Slow()
    with serving(runner) as (address, worker), runner.unhindered():
        wait = WebDriverWait(browser, 20)
        browser.get(address)
        wait.until(lambda _: browser.title == "tiny")

        def ask(text: str) -> str:
            """Type a question; gives the prompt that the engine gets."""
            browser.find_element(By.ID, "question").send_keys(text, "\n")
            wait_until(lambda: worker.num_running == 1)
            (request,) = worker.assistant.engine.scheduler.running
            return bytes(token for token in request.prompt if token < 256).decode()

        def said() -> str:
            """The text of the newest answer."""
            return browser.find_elements(By.CSS_SELECTOR, ".assistant span")[-1].get_property("textContent")

        assert "first" in ask("first question")
        lengths = []
        for _ in range(4):
            runner.permits.release(8)
            wait.until(lambda _: len(said()) > (lengths[-1] if lengths else 0))
            lengths.append(len(said()))
        answer = said()
        browser.find_element(By.ID, "stop").click()
        runner.permits.release(1)
        wait_until(lambda: worker.assistant.is_idle)
        assert worker.counts[None].ended == {"cancelled": 1}
        wait.until(lambda _: browser.find_element(By.ID, "send").is_displayed())
        prompt = ask("second question")
        assert prompt.index("first question") < prompt.index(answer) < prompt.index("second question")
        browser.find_element(By.ID, "new").click()
        runner.permits.release(1)
        wait_until(lambda: worker.assistant.is_idle)
        wait.until(lambda _: browser.find_element(By.ID, "send").is_displayed())
        prompt = ask("third question")
        assert "question" in prompt and "second" not in prompt and prompt.count("assistant") == 1
        runner.permits.release(1000)
        wait.until(lambda _: "tokens/s" in browser.find_element(By.ID, "talk").text)
        addresses = asked_for(browser)
        assert addresses.count(f"{address}/v1/chat/completions") == 3
        assert all(url.startswith((f"{address}/", "data:")) for url in addresses), addresses


@pytest.mark.full("a browser")
@pytest.mark.skipif(None in (BROWSER, DRIVER), reason="needs Chromium: apt-get install chromium chromium-driver")
@pytest.mark.parametrize("needs_key", [False, True])
def test_a_model_is_chosen_in_a_browser(browser, needs_key):
    """All models of the list can be chosen, the base comes first; a question goes to the one that is chosen then. Where a key is
    needed, the list comes once it is given."""
    runner = Slow(["french", "sql"])
    keys = ("secret",) if needs_key else ()
    with serving(runner, api_keys=keys) as (address, worker), runner.unhindered():
        wait = WebDriverWait(browser, 20)
        browser.get(address)
        browser.find_element(By.TAG_NAME, "summary").click()
        browser.execute_script("document.getElementById('max_tokens').value = 1")  # so that one step ends an answer
        if needs_key:
            browser.find_element(By.ID, "key").send_keys("secret\t")
        wait.until(lambda _: browser.title == "tiny")
        choice = Select(browser.find_element(By.ID, "model"))
        assert [option.text for option in choice.options] == ["tiny", "french", "sql"]
        asked = []
        for name in ("tiny", "sql"):
            choice.select_by_visible_text(name)
            browser.find_element(By.ID, "question").send_keys("hello", "\n")
            wait_until(lambda: worker.num_running == 1)
            asked.append(worker.assistant.engine.scheduler.running[0].adapter)
            runner.permits.release(1)
            wait.until(lambda _: browser.find_element(By.ID, "send").is_displayed())
            assert f"{name}, 1 tokens" in browser.find_elements(By.CSS_SELECTOR, ".assistant")[-1].text
        assert asked == [0, 2]


@pytest.mark.full("a browser")
@pytest.mark.skipif(None in (BROWSER, DRIVER), reason="needs Chromium: apt-get install chromium chromium-driver")
def test_a_single_model_needs_no_choice(browser, server):
    """The list is not shown."""
    browser.get(server[0])
    WebDriverWait(browser, 20).until(lambda _: browser.title == "tiny")
    assert not browser.find_element(By.ID, "model").is_displayed()

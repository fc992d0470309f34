import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from faulty_proxy import CHAT, FAULTS, SLOW, FaultyProxy, Instead, no_faults
from llama_server import LlamaServer, to_gguf
from safetensors.torch import load_file, save_file
from tiny import SENTENCES, tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import command
from dflash.answers import LENGTH, REFUSED, STOP, Request
from dflash.config import RegenerateConfig
from dflash.conversation import Template
from dflash.endpoint import LONGEST_QUOTE, TRIES, Endpoint, ServerFailed

KEY_VARIABLE, KEY = "TINY_SERVER_KEY", "sk-tiny-7c1e93b2"
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
OTHER_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ': ' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def no_test_hangs():
    def give_up(*_):
        raise AssertionError("the test hangs")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tiny_target(tmp_path_factory.mktemp("endpoint") / "target", "llama", layers=2)
    weights, tokenizer = load_file(directory / "model.safetensors"), AutoTokenizer.from_pretrained(directory)
    weights["lm_head.weight"][2] *= 3  # a random target seldom ends its turn
    for token in range(len(tokenizer)):
        if "\ufffd" in tokenizer.decode([token]):  # and says much that is no text, which servers cut in their own ways
            weights["lm_head.weight"][token] = 0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def template(target):
    return Template(AutoTokenizer.from_pretrained(target), {})


@pytest.fixture(scope="module")
def model_file(target):
    return to_gguf(target, target.parent / "target.gguf")


@pytest.fixture(scope="module")
def server(model_file):
    with LlamaServer(model_file) as server:
        yield server


def endpoint(url, template, **changes):
    config = RegenerateConfig(
        endpoint=url + "/v1",
        **{
            "max_new_tokens": 12,
            "request_seconds": 20.0,
            "outage_seconds": 20.0,
            "requests_in_flight": 4,
            **GREEDY,
            **changes,
        },
    )
    return Endpoint(config, template)


def checked(*arguments, **changes):
    source = endpoint(*arguments, **changes)
    source.check()
    return source


def requests(template, count=12):
    return [request(template, f"chat-{index}", f"{SENTENCES[index % 10]} ({index})") for index in range(count)]


def request(template, key, text, *before):
    messages = [*before, {"role": "user", "content": text}]
    rendered = template.render(messages, None, add_generation_prompt=True)
    return Request(key=key, messages=messages, tools=None, prompt_tokens=template.tokens(rendered))


class Waiting:
    """Requests in the order in which they came."""

    def __init__(self, waiting):
        self.waiting = list(waiting)

    def take(self, count):
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken


def answered(source, wanted):
    """{key: answer} of each request, each answered once."""
    pairs = [(request.key, answer) for request, answer in source.answers(Waiting(wanted))]
    assert sorted(key for key, _ in pairs) == sorted(request.key for request in wanted)
    return dict(pairs)


@pytest.fixture(scope="module")
def undisturbed(server, template):
    return answered(checked(server.url, template), requests(template))


def prompt_of(body):
    return body["messages"][-1]["content"]


# ---------------------------------------------------------------- what a server is asked and what it answers


def test_greedy_answers_are_those_of_the_target_run_by_transformers(target, template, undisturbed):
    model, endings = AutoModelForCausalLM.from_pretrained(target), Counter()
    for wanted in requests(template):
        answer, prompt = undisturbed[wanted.key], torch.tensor([wanted.prompt_tokens])
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        new = ids[0, prompt.shape[1] :].tolist()
        assert answer.completion_tokens == len(new)
        assert answer.finish_reason == (STOP if new[-1] == 2 else LENGTH)
        assert answer.content == template.tokenizer.decode(new, skip_special_tokens=True)
        assert answer.token_ids is None
        endings[answer.finish_reason] += 1
    assert endings[STOP] >= 2
    assert endings[LENGTH] >= 2


def test_sampled_answers_come_from_the_prompt_s_key_and_the_seed_alone(server, template):
    def sample(wanted, **changes):
        return answered(checked(server.url, template, temperature=1.0, **changes), wanted)

    wanted = requests(template, 6)
    one = sample(wanted, requests_in_flight=1)
    assert sample(wanted[::-1], requests_in_flight=4) == one
    assert sample(wanted, seed=1) != one
    same_prompt = [replace(wanted[0], key=f"key-{index}") for index in range(6)]
    assert len({answer.content for answer in sample(same_prompt).values()}) == 6


def test_candidates_are_taken_after_the_temperature_from_every_token_or_the_top_k(server, template):
    wanted = [request(template, f"key-{index}", "hi") for index in range(90)]

    def first_tokens(**sampling):
        source = checked(server.url, template, temperature=50.0, max_new_tokens=1, **sampling)
        return len({answer.content for answer in answered(source, wanted).values()})

    # so hot that every token is about as likely as another, and the first half of them are many
    assert first_tokens() > 50
    assert first_tokens(top_p=0.5) > 50
    assert first_tokens(top_k=3) == 3


def test_a_server_s_own_sampling_defaults_change_no_answer(server, template, model_file, undisturbed):
    odd = {"penalty_repeat": 1.5, "penalty_present": 1.0, "penalty_freq": 1.0, "min_p": 0.5, "top_k": 2, "top_p": 0.5}
    wanted = requests(template)
    hot = answered(checked(server.url, template, temperature=1.0), wanted)
    with LlamaServer(model_file, typ_p=0.5, xtc_probability=0.5, **odd) as other:
        assert answered(checked(other.url, template), wanted) == undisturbed
        assert answered(checked(other.url, template, temperature=1.0), wanted) == hot


def test_template_variables_reach_the_server_and_its_tokens_are_compared_with_them(target, model_file):
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{{ tone or 'plain' }}" + tokenizer.chat_template
    spoken = to_gguf(target, model_file.with_name("tone.gguf"), chat_template=tokenizer.chat_template)
    template = Template(tokenizer, {"tone": "loud"})
    with LlamaServer(spoken) as server, FaultyProxy(server.url) as proxy:
        answer = answered(checked(proxy.url, template), requests(template, 1))["chat-0"]
        assert answer.finish_reason in (STOP, LENGTH)
        assert proxy.completions[-1]["chat_template_kwargs"] == {"tone": "loud"}


def test_an_answered_conversation_may_have_a_next_turn(server, template):
    first = requests(template, 3)
    pending, turns = Waiting(first), Counter()
    for asked, answer in checked(server.url, template).answers(pending):
        chat = asked.key.partition("/")[0]
        turns[chat] += 1
        if turns[chat] < 3:
            reply = {"role": "assistant", "content": answer.content}
            pending.waiting.append(request(template, f"{chat}/{turns[chat]}", "And then?", *asked.messages, reply))
    assert turns == {"chat-0": 3, "chat-1": 3, "chat-2": 3}


def test_no_more_requests_are_in_flight_than_configured_and_no_fewer(server, template):
    together = threading.Barrier(3)

    def wait_for_two_others(path, body, tries):
        if path == CHAT and body["max_tokens"] > 1:
            together.wait(20)

    with FaultyProxy(server.url, wait_for_two_others) as proxy:
        answered(checked(proxy.url, template, requests_in_flight=3), requests(template))
        assert proxy.most_in_flight == 3


def test_a_slow_answer_holds_up_no_other(server, template):
    others_done, keys = threading.Event(), []

    def plan(path, body, tries):
        if path == CHAT and body["max_tokens"] > 1 and "(0)" in prompt_of(body):
            others_done.wait(60)

    with FaultyProxy(server.url, plan) as proxy:
        source = checked(proxy.url, template, requests_in_flight=2, request_seconds=60.0)
        for asked, _ in source.answers(Waiting(requests(template, 6))):
            keys.append(asked.key)
            if len(keys) == 5:
                others_done.set()
    assert keys[-1] == "chat-0"
    assert len(keys) == 6


def test_a_reply_that_was_cut_while_it_reasoned_has_no_content(server, template):
    def plan(path, body, tries):
        def change(completion):
            message = {"role": "assistant", "content": None, prompt_of(body): "Let me see"}
            return {**completion, "choices": [{"message": message, "finish_reason": "length"}]}

        return change if path == CHAT else None

    with FaultyProxy(server.url, plan) as proxy:
        for name in ("reasoning_content", "reasoning"):
            answer = answered(checked(proxy.url, template), [request(template, "chat", name)])["chat"]
            assert (answer.content, answer.reasoning, answer.finish_reason) == ("", "Let me see", LENGTH)


def test_tokens_are_counted_here_where_the_server_does_not(server, template, undisturbed):
    def without_usage(path, body, tries):
        return (lambda completion: {**completion, "usage": None}) if path == CHAT else None

    with FaultyProxy(server.url, without_usage) as proxy:
        answer = answered(checked(proxy.url, template), requests(template, 1))["chat-0"]
    assert answer.content == undisturbed["chat-0"].content
    assert answer.completion_tokens == len(template.tokenizer(answer.content)["input_ids"])


@pytest.mark.parametrize("ending", ["tool_calls", "content_filter"])
def test_a_reply_that_is_no_text_is_refused(server, template, ending):
    def ended(path, body, tries):
        def change(completion):
            return {**completion, "choices": [{**completion["choices"][0], "finish_reason": ending}]}

        return change if path == CHAT and body["max_tokens"] > 1 else None

    with FaultyProxy(server.url, ended) as proxy:
        answer = answered(checked(proxy.url, template), requests(template, 1))["chat-0"]
    assert (answer.finish_reason, answer.content) == (REFUSED, "")
    assert ending in answer.detail


# ---------------------------------------------------------------- the check at the start


def test_the_identity_of_a_server_is_its_model_s_name_wherever_it_listens(server, template):
    with FaultyProxy(server.url) as proxy:
        assert (
            checked(proxy.url, template).identity == checked(server.url, template).identity == {"served_model": "tiny"}
        )
    assert endpoint("http://127.0.0.1:9", template, endpoint_model="given").identity == {"served_model": "given"}


def test_a_server_with_another_template_is_refused_with_the_first_difference(target, template, model_file):
    with LlamaServer(to_gguf(target, model_file.with_name("other.gguf"), chat_template=OTHER_TEMPLATE)) as server:
        difference = r"at position 2 the server has \d+ ':', the target 201 '\\n'"
        with pytest.raises(
            ValueError, match=rf"regenerate\.endpoint={server.url}/v1: .*{difference}; start the server with"
        ):
            checked(server.url, template)


def test_a_server_with_another_tokenizer_is_refused_with_the_first_difference(template, server):
    tokenizer = tiny_tokenizer(300)
    other = Template(tokenizer, {})
    with pytest.raises(
        ValueError, match=r"at position 1 the server has 401 .*, the target \d+ .*; start the server with"
    ):
        checked(server.url, other)


def test_a_difference_in_system_messages_alone_is_found(target, template, model_file):
    silent = template.tokenizer.chat_template.replace("messages %}", "messages if message['role'] != 'system' %}")
    assert silent != template.tokenizer.chat_template
    with LlamaServer(to_gguf(target, model_file.with_name("silent.gguf"), chat_template=silent)) as server:
        with pytest.raises(ValueError, match="does not read a conversation"):
            checked(server.url, template)


def vllm(template, *, tokenize, completion):
    """A plan that answers as vLLM (SGLang) documents it: token ids of messages at /tokenize, or with a completion."""

    def ids(body):
        kwargs = body.get("chat_template_kwargs", {})
        return template.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=False, **kwargs
        )

    def plan(path, body, tries):
        if path == "/tokenize":
            if not tokenize:
                return Instead(404, {"detail": "Not Found"})
            assert body.keys() <= {"model", "messages", "chat_template_kwargs"}
            return Instead(200, {"count": len(ids(body)), "max_model_len": 512, "tokens": ids(body)})
        if path == "/apply-template":
            return Instead(404, {"detail": "Not Found"})
        if path == CHAT and body.get("return_token_ids"):
            place = {"vllm": {"prompt_token_ids": ids(body)}, "sglang": {}, None: {}}[completion]
            inner = {"prompt_token_ids": ids(body)} if completion == "sglang" else {}
            return lambda said: {**said, **place, "choices": [{**said["choices"][0], **inner}]}
        return None

    return plan


@pytest.mark.parametrize("tokenize, completion", [(True, None), (False, "vllm"), (False, "sglang")])
def test_servers_that_tokenize_chats_or_return_their_ids_are_checked_by_these(server, template, tokenize, completion):
    with FaultyProxy(server.url, vllm(template, tokenize=tokenize, completion=completion)) as proxy:
        checked(proxy.url, template)
    other = Template(tiny_tokenizer(300), {})
    with FaultyProxy(server.url, vllm(other, tokenize=tokenize, completion=completion)) as proxy:
        with pytest.raises(ValueError, match=r"at position 1 the server has \d+ .*, the target 401"):
            checked(proxy.url, template)


def test_a_server_that_shows_its_ids_in_no_way_is_refused(server, template):
    with FaultyProxy(server.url, vllm(template, tokenize=False, completion=None)) as proxy:
        with pytest.raises(ValueError, match="shows in no way which token ids it reads.*; use a current vLLM"):
            checked(proxy.url, template)


def test_a_server_that_counts_other_prompt_tokens_is_refused_at_the_start_and_a_prompt_that_it_miscounts_later(
    server, template
):
    def miscount(completion):
        usage = completion["usage"]
        return {**completion, "usage": {**usage, "prompt_tokens": usage["prompt_tokens"] + 1}}

    with FaultyProxy(server.url, lambda path, *_: miscount if path == CHAT else None) as proxy:
        with pytest.raises(ValueError, match=r"the server read \d+ prompt tokens"):
            checked(proxy.url, template)
    with FaultyProxy(server.url, lambda path, body, _: miscount if body.get("max_tokens", 1) > 1 else None) as proxy:
        wanted = requests(template, 1)
        ours = len(wanted[0].prompt_tokens)
        answer = answered(checked(proxy.url, template), wanted)[wanted[0].key]
        assert answer.finish_reason == REFUSED
        assert f"the server read {ours + 1} prompt tokens" in answer.detail
        assert f"gives {ours}" in answer.detail


def test_of_several_models_one_must_be_named(server, template):
    def two_models(path, body, tries):
        return Instead(200, {"data": [{"id": "small"}, {"id": "large"}]}) if path == "/v1/models" else None

    with FaultyProxy(server.url, two_models) as proxy:
        with pytest.raises(
            ValueError, match=r"serves 2 models \(small, large\); name one as regenerate.endpoint_model"
        ):
            checked(proxy.url, template)
        checked(proxy.url, template, endpoint_model="large")
        assert {body["model"] for body in proxy.completions} == {"large"}


def test_a_model_that_the_server_does_not_know_is_refused_with_its_words(server, template):
    unknown = Instead(404, {"error": {"message": "The model `large` does not exist.", "code": 404}})
    for paths in ((CHAT,), (CHAT, "/tokenize", "/apply-template")):
        with FaultyProxy(server.url, lambda path, *_, paths=paths: unknown if path in paths else None) as proxy:
            with pytest.raises(ValueError, match="HTTP 404: The model `large` does not exist.; start the server"):
                checked(proxy.url, template, endpoint_model="large")


def test_a_gateway_that_lets_nothing_through_but_v1_is_no_hindrance(server, template):
    documented = vllm(template, tokenize=False, completion="vllm")

    def gateway(path, body, tries):
        return documented(path, body, tries) if path.startswith("/v1/") else Instead(403, "forbidden")

    with FaultyProxy(server.url, gateway) as proxy:
        checked(proxy.url, template)


def test_a_server_that_hangs_at_the_start_is_refused_after_one_wait(server, template):
    with FaultyProxy(server.url, lambda path, *_: SLOW if path == CHAT else None) as proxy:
        with pytest.raises(ValueError, match="no answer within 1 s; start the server"):
            checked(proxy.url, template, request_seconds=1.0)
        assert len(proxy.completions) == 1


def test_a_server_that_cannot_be_reached_at_the_start_is_refused_at_once(template):
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"regenerate\.endpoint=http://127.0.0.1:9/v1: the server cannot be reached"):
        checked("http://127.0.0.1:9", template, outage_seconds=300.0)
    assert time.monotonic() - began < 30


def test_a_server_that_is_busy_at_the_start_is_asked_again(server, template):
    with FaultyProxy(server.url, lambda path, body, tries: FAULTS["busy"] if tries == 0 else None) as proxy:
        checked(proxy.url, template)


@pytest.mark.parametrize(
    "address",
    [
        "localhost:8000/v1",
        "ftp://localhost/v1",
        "/v1",
        "http://",
        "http://me:secret@host/v1",
        "me:secret@host/v1",
        "http://me:sec:ret@host/v1",
        "http://host/v1?key=secret",
    ],
)
def test_an_address_that_is_none_is_refused_and_no_secret_in_it_shown(template, address):
    with pytest.raises(ValueError, match="regenerate.endpoint") as refusal:
        Endpoint(RegenerateConfig(endpoint=address), template)
    assert "secret" not in str(refusal.value)
    assert "ret@" not in str(refusal.value)


# ---------------------------------------------------------------- faults


def test_faults_lose_nothing_and_double_nothing(server, template, undisturbed):
    faults = list(FAULTS.values())

    def plan(path, body, tries):
        if path != CHAT or body["max_tokens"] == 1:
            return None
        number = int(prompt_of(body).rpartition("(")[2].rstrip(")"))
        first = number % len(faults)
        return faults[(first + 3 * tries) % len(faults)] if tries < 2 else None

    with FaultyProxy(server.url, plan) as proxy:
        assert answered(checked(proxy.url, template, request_seconds=1.0), requests(template)) == undisturbed
        asked = Counter(prompt_of(body) for body in proxy.completions if body["max_tokens"] > 1)
    assert set(asked.values()) == {3}


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr("dflash.endpoint.LONGEST_WAIT_SECONDS", 0.2)


def test_retry_after_is_obeyed_but_not_for_longer_than_an_outage(server, template):
    came = []

    def plan(path, body, tries):
        if path == CHAT and body["max_tokens"] > 1:
            came.append(time.monotonic())
            return [Instead(429, headers={"Retry-After": "1"}), Instead(503, headers={"Retry-After": "3600"}), None][
                tries
            ]

    with FaultyProxy(server.url, plan) as proxy:
        answered(checked(proxy.url, template, outage_seconds=2.0), requests(template, 1))
    assert came[1] - came[0] >= 1
    assert came[2] - came[1] >= 0.5  # what is left of the 2 s
    assert came[2] - came[0] < 30


def test_a_prompt_that_fails_for_ever_is_refused_even_as_the_last_one_and_one_that_is_at_fault_at_once(
    server, template, short_waits
):
    wanted = requests(template, 5)
    faults = {
        prompt_of({"messages": wanted[1].messages}): Instead(500, {"error": {"message": "CUDA error"}}),
        prompt_of({"messages": wanted[2].messages}): FAULTS["broken"],
        prompt_of({"messages": wanted[3].messages}): Instead(400, {"error": {"message": "too long by 7 tokens"}}),
        prompt_of({"messages": wanted[4].messages}): FAULTS["dropped"],
    }
    with FaultyProxy(server.url, lambda path, body, _: faults.get(prompt_of(body)) if path == CHAT else None) as proxy:
        answers = answered(checked(proxy.url, template), wanted)
        asked = Counter(prompt_of(body) for body in proxy.completions if body["max_tokens"] > 1)
    assert answers["chat-0"].finish_reason != REFUSED
    assert {answers[f"chat-{index}"].finish_reason for index in range(1, 5)} == {REFUSED}
    assert answers["chat-1"].detail == f"{TRIES} tries, the last: HTTP 500: CUDA error"
    assert answers["chat-2"].detail.startswith(f"{TRIES} tries, the last: not a JSON object")
    assert answers["chat-3"].detail == "HTTP 400: too long by 7 tokens"
    assert sorted(asked.values()) == [1, 1, TRIES, TRIES, TRIES]


def test_a_server_that_is_too_busy_for_one_prompt_does_not_refuse_it(server, template, undisturbed, short_waits):
    wanted = requests(template, 1)

    def plan(path, body, tries):
        return FAULTS["busy"] if path == CHAT and body["max_tokens"] > 1 and tries <= TRIES else None

    with FaultyProxy(server.url, plan) as proxy:
        assert answered(checked(proxy.url, template, outage_seconds=30.0), wanted) == {"chat-0": undisturbed["chat-0"]}


def test_a_server_that_dies_and_comes_back_loses_nothing(model_file, template, undisturbed):
    pairs, servers = [], [LlamaServer(model_file)]
    source = checked(servers[0].url, template)
    try:
        for asked, answer in source.answers(Waiting(requests(template))):
            pairs.append((asked.key, answer))
            if len(pairs) == 2:
                servers[0].kill()
                again = threading.Timer(1.0, lambda: servers.append(LlamaServer(model_file, port=servers[0].port)))
                again.start()
    finally:
        again.join()
        servers[1].kill()
    assert len(pairs) == len(undisturbed)
    assert dict(pairs) == undisturbed


def test_a_server_that_stays_away_ends_the_work_in_one_line_after_what_it_answered(model_file, template, undisturbed):
    pairs = []
    with LlamaServer(model_file) as server:
        source = checked(server.url, template, outage_seconds=2.0)
        began = 0.0
        with pytest.raises(ServerFailed) as failure:
            for asked, answer in source.answers(Waiting(requests(template))):
                pairs.append((asked.key, answer))
                if len(pairs) == 3:
                    server.kill()
                    began = time.monotonic()
    assert 2 <= time.monotonic() - began < 30
    assert str(failure.value).startswith(f"regenerate.endpoint={server.url}/v1: the server has answered nothing for")
    assert "outage_seconds=2; last seen: the server cannot be reached: " in str(failure.value)
    assert str(failure.value).endswith("start it again, then the same command goes on")
    assert "\n" not in str(failure.value)
    assert len(pairs) >= 3
    assert all(undisturbed[key] == answer for key, answer in pairs)
    assert len({key for key, _ in pairs}) == len(pairs)


def test_what_came_together_with_a_failure_is_not_lost(server, template):
    together, release = threading.Barrier(3), threading.Event()

    def plan(path, body, tries):
        if path == CHAT and body["max_tokens"] > 1:
            together.wait(60)
            if "(0)" not in prompt_of(body):
                release.wait(60)
            return Instead(403) if "(1)" in prompt_of(body) else None

    with FaultyProxy(server.url, plan) as proxy:
        answers = checked(proxy.url, template, requests_in_flight=3).answers(Waiting(requests(template, 3)))
        assert next(answers)[0].key == "chat-0"
        release.set()
        while proxy.in_flight:
            time.sleep(0.01)
        assert next(answers)[0].key == "chat-2"
        with pytest.raises(ServerFailed):
            next(answers)


@pytest.mark.parametrize("fault", [SLOW, Instead(404, "no such model"), Instead(502), Instead(429)], ids=str)
def test_a_server_that_answers_nobody_refuses_no_prompt_but_ends_the_work(server, template, fault):
    with FaultyProxy(server.url) as proxy:
        source = checked(proxy.url, template, outage_seconds=1.0, request_seconds=1.0)
        proxy.plan = lambda *_: fault
        with pytest.raises(ServerFailed, match="answered nothing for"):
            for _ in source.answers(Waiting(requests(template))):
                raise AssertionError("an answer of a server that gives none")


# ---------------------------------------------------------------- leaving


def hold_all_but_one(path, body, tries):
    return SLOW if path == CHAT and body["max_tokens"] > 1 and "(0)" not in prompt_of(body) else None


def test_leaving_early_waits_for_no_answer_and_hangs_up(server, template):
    with FaultyProxy(server.url, hold_all_but_one) as proxy:
        answers = checked(proxy.url, template).answers(Waiting(requests(template)))
        asked, _ = next(answers)
        assert asked.key == "chat-0"
        began = time.monotonic()
        answers.close()
        while proxy.in_flight:
            time.sleep(0.01)
        assert time.monotonic() - began < 15  # of 20 that a request may take


@pytest.mark.parametrize("handler", [signal.default_int_handler, command.stop_at_once])
def test_an_interrupt_waits_for_no_answer(server, template, handler):
    with FaultyProxy(server.url, hold_all_but_one) as proxy:
        answers = checked(proxy.url, template).answers(Waiting(requests(template)))
        next(answers)
        before = [(number, signal.getsignal(number)) for number in command.STOP_SIGNALS]
        signal.signal(signal.SIGINT, handler)
        began = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                next(answers)
        finally:
            for number, old in before:
                signal.signal(number, old)
        while proxy.in_flight:
            time.sleep(0.01)
        assert time.monotonic() - began < 15


# ---------------------------------------------------------------- the key


def test_the_key_of_the_environment_opens_a_server_that_wants_one(model_file, template, monkeypatch):
    with LlamaServer(model_file, key=KEY) as server:
        monkeypatch.setenv(KEY_VARIABLE, KEY)
        answers = answered(checked(server.url, template, endpoint_key=KEY_VARIABLE), requests(template, 1))
        assert answers["chat-0"].finish_reason != REFUSED
        monkeypatch.setenv(KEY_VARIABLE, "sk-wrong")
        with pytest.raises(
            ValueError, match=f"does not accept the key in the environment variable {KEY_VARIABLE} "
        ) as wrong:
            checked(server.url, template, endpoint_key=KEY_VARIABLE)
        assert "sk-wrong" not in str(wrong.value)
        monkeypatch.delenv(KEY_VARIABLE)
        with pytest.raises(ValueError, match=f"wants a key; put it into the environment variable {KEY_VARIABLE} "):
            checked(server.url, template, endpoint_key=KEY_VARIABLE)


def test_a_key_that_is_no_longer_accepted_ends_the_work_at_once(server, template, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with FaultyProxy(server.url) as proxy:
        source = checked(proxy.url, template, endpoint_key=KEY_VARIABLE)
        proxy.plan = lambda *_: Instead(403, {"error": {"message": f"{KEY} has expired"}})
        with pytest.raises(ServerFailed, match=f"the environment variable {KEY_VARIABLE} .* 403") as failure:
            answered(source, requests(template, 3))
    assert KEY not in str(failure.value)


def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(template, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "sk-clé-secret")
    with pytest.raises(ValueError, match=KEY_VARIABLE) as refusal:
        endpoint("http://127.0.0.1:9", template, endpoint_key=KEY_VARIABLE)
    assert "secret" not in str(refusal.value)


def test_the_key_is_never_shown_even_when_the_server_sends_it_back(server, template, monkeypatch, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(KEY_VARIABLE, f' {KEY}"\\\n')  # what JSON must escape
    echo = f'the key {KEY}"\\ is odd'
    cut = "x" * (LONGEST_QUOTE - len("HTTP 400: ") - 12) + echo[7:]  # in the middle of the key
    words = {
        "(0)": Instead(400, {"error": {"message": echo}}),
        "(1)": Instead(422, {"detail": [{"msg": echo}]}),
        "(2)": Instead(400, echo),
        "(3)": Instead(400, cut),
    }
    odd_completion = {"choices": [{"message": {"content": [echo]}, "finish_reason": "stop"}]}

    def plan(path, body, tries):
        return words[prompt_of(body)[-3:]] if path == CHAT and body["max_tokens"] > 1 else None

    shown = []
    with FaultyProxy(server.url, plan) as proxy:
        source = checked(proxy.url, template, endpoint_key=KEY_VARIABLE)
        shown += [answer.detail for answer in answered(source, requests(template, 4)).values()]
        shown += [repr(source), json.dumps(source.identity)]
        proxy.plan = lambda *_: Instead(500, echo)
        silent = endpoint(proxy.url, template, endpoint_key=KEY_VARIABLE, outage_seconds=0.5)
        with pytest.raises(ValueError, match="HTTP 500") as refusal:
            silent.check()
        proxy.plan = no_faults
        silent.check()
        proxy.plan = lambda *_: Instead(500, echo)
        with pytest.raises(ServerFailed, match="HTTP 500") as failure:
            answered(silent, requests(template, 2))
        proxy.plan = lambda *_: Instead(200, odd_completion)
        with pytest.raises(ServerFailed, match="a completion with content") as other_failure:
            answered(silent, requests(template, 2))
    for error in (refusal.value, failure.value, other_failure.value):
        while error is not None:
            shown.append(repr(error))
            error = error.__cause__ or error.__context__
    assert sum("***" in text for text in shown) >= 7
    out, err = capfd.readouterr()
    assert caplog.records
    assert KEY[:8] not in "\n".join([*shown, out, err, caplog.text])

"""Headers, names, addresses and who gets what: the proxy around the bytes."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import ssl
import subprocess
from pathlib import Path

import orjson
import pytest

from tests.gateway.scripted import CHAT, Connection, Seen, gateway, playing, replica
from tests.gateway.test_failures import GOOD_STREAM, GOOD_WHOLE, STREAM_HEAD, WHOLE, chunk, whole


async def test_headers_of_one_hop_stay_and_the_others_go_on() -> None:
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        await g.post(
            "/v1/completions",
            WHOLE,
            "Connection: keep-alive, X-Secret\r\nX-Secret: 1\r\nTE: trailers\r\nKeep-Alive: timeout=5\r\n"
            "Proxy-Authorization: x\r\nAccept-Encoding: gzip\r\ntraceparent: 00-aa-bb-01\r\nX-Mine: kept\r\n"
            "Authorization: Bearer passed\r\nX-Forwarded-For: 6.6.6.6\r\nForwarded: for=6.6.6.6\r\n",
        )
        seen = a.seen[0]
        for name in (b"x-secret", b"te", b"keep-alive", b"connection", b"proxy-authorization", b"accept-encoding"):
            assert seen.header(name) is None, name
        assert seen.header(b"traceparent") == b"00-aa-bb-01"
        assert seen.header(b"x-mine") == b"kept"
        assert seen.header(b"authorization") == b"Bearer passed"
        assert seen.header(b"host") == b"127.0.0.1:%d" % a.port
        # an untrusted client cannot speak for others
        assert seen.header(b"x-forwarded-for") == b"127.0.0.1"
        assert seen.header(b"x-forwarded-host") == b"gateway"
        assert seen.header(b"forwarded") is None


async def test_a_trusted_proxy_speaks_for_its_clients() -> None:
    settings = 'listen.trusted_proxies = ["127.0.0.1"]'
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a, settings=settings) as g:
        forwarded = "X-Forwarded-For: 10.1.1.1\r\nX-Forwarded-Proto: https\r\nForwarded: for=10.1.1.1\r\n"
        await g.post("/v1/completions", WHOLE, forwarded)
        assert a.seen[0].header(b"x-forwarded-for") == b"10.1.1.1, 127.0.0.1"
        assert a.seen[0].header(b"x-forwarded-proto") == b"https"
        assert a.seen[0].header(b"forwarded") == b"for=10.1.1.1, for=127.0.0.1"


async def test_request_id_is_accepted_or_made_and_always_told() -> None:
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        answer = await g.post("/v1/completions", WHOLE, "X-Request-Id: mine-1\r\n")
        assert (answer.header("x-request-id"), a.seen[0].header(b"x-request-id")) == ("mine-1", b"mine-1")
        first, second = [await g.post("/v1/completions", WHOLE) for _ in range(2)]
        assert first.header("x-request-id") != second.header("x-request-id")
        assert (a.seen[1].header(b"x-request-id") or b"").decode() == first.header("x-request-id")
        # one id twice at once is two requests
        answers = await asyncio.gather(*[g.post("/v1/completions", WHOLE, "X-Request-Id: same\r\n") for _ in range(3)])
        assert [x.status for x in answers] == [200, 200, 200]
        refused = await g.post("/v1/nothing", WHOLE, "X-Request-Id: mine-2\r\n")
        assert refused.header("x-request-id") == "mine-2"


async def test_response_headers_say_where_and_why() -> None:
    async with replica(playing(GOOD_STREAM)) as a, gateway(a) as g:
        answer = await g.post("/v1/chat/completions", CHAT)
        assert answer.header("x-forebay-replica") == "r0"
        assert answer.header("x-forebay-reason") == "turn"
        assert float(answer.header("x-forebay-queue-ms") or "-1") >= 0
        assert (answer.header("server-timing") or "").startswith("queue;dur=")
        assert answer.header("x-accel-buffering") == "no"


async def test_proxy_variables_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        assert (await g.post("/v1/completions", WHOLE)).status == 200


async def test_base_url_with_a_path_prefix_and_a_query() -> None:
    async with replica(playing(GOOD_WHOLE)) as a, gateway(f"http://127.0.0.1:{a.port}/team/a") as g:
        await g.post("/v1/completions?debug=1", WHOLE)
        assert a.seen[0].line == b"POST /team/a/v1/completions?debug=1 HTTP/1.1"


async def test_ipv6_replica() -> None:
    async with replica(playing(GOOD_WHOLE), host="::1") as a, gateway(f"http://[::1]:{a.port}") as g:
        assert (await g.post("/v1/completions", WHOLE)).status == 200
        assert a.seen[0].header(b"host") == b"[::1]:%d" % a.port


def certificate(folder: Path) -> tuple[Path, Path]:
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=127.0.0.1",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            str(key),
            "-out",
            str(cert),
        ],
        check=True,
        capture_output=True,
    )
    return key, cert


async def test_tls_replica_with_a_private_authority(tmp_path: Path) -> None:
    key, cert = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    async with replica(playing(GOOD_STREAM), ssl=context) as a:
        async with gateway(f"https://127.0.0.1:{a.port}", ca_file=str(cert)) as g:
            for _ in range(2):
                answer = await g.post("/v1/chat/completions", CHAT)
                assert answer.body.endswith(b"data: [DONE]\n\n")
            assert a.connections == 1
        async with gateway(f"https://127.0.0.1:{a.port}") as g:  # an authority nobody trusts
            assert (await g.post("/v1/chat/completions", CHAT)).status == 502


async def test_models_are_merged_and_unknown_ones_are_404() -> None:
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        client = await g.connect()
        await client.send(b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n")
        assert [m["id"] for m in orjson.loads((await client.answer()).body)["data"]] == ["tiny"]
        client.close()
        answer = await g.post("/v1/completions", b'{"model":"nope","prompt":"x"}')
        assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (404, "unknown_model")
        g.fleet.drain("r0")
        answer = await g.post("/v1/completions", WHOLE)
        assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (503, "no_replica")
        assert answer.header("retry-after") is not None
        assert a.seen == []


async def test_no_model_means_the_default_model() -> None:
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        assert (await g.post("/v1/completions", b'{"prompt":"x"}')).status == 200
        assert (await g.record()).model == "tiny"
        assert a.seen[0].body == b'{"prompt":"x"}'


@pytest.mark.parametrize("body", [b"{", b"[1]", b"", b'{"model":7}', b'{"a":\xff}'])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_malformed_bodies_are_400_in_the_apis_own_form(path: str, body: bytes) -> None:
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        answer = await g.post(path, body)
        assert answer.status == 400
        error = orjson.loads(answer.body)
        assert error["error"]["code"] == "malformed"
        assert (error.get("type") == "error") == (path == "/v1/messages")
        assert a.seen == []
        assert (await g.record()).outcome == "client_error"


async def test_objectives_in_headers_tighten_and_never_loosen() -> None:
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a) as g:
        await g.post("/v1/completions", WHOLE, "x-slo-ttft-ms: 500\r\nx-slo-tpot-ms: 900\r\n")
        objectives = (await g.record()).objectives
        assert (objectives.ttft_s, objectives.tpot_s) == (0.5, 0.2)
        answer = await g.post("/v1/completions", WHOLE, "x-slo-ttft-ms: soon\r\n")
        assert (answer.status, orjson.loads(answer.body)["error"]["param"]) == (400, "x-slo-ttft-ms")
        answer = await g.post("/v1/completions", WHOLE, "x-service-class: gold\r\n")
        assert (answer.status, orjson.loads(answer.body)["error"]["param"]) == (400, "x-service-class")


async def test_audio_goes_on_as_it_came() -> None:
    audio = bytes(range(256)) * 100
    body = (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + audio + b"\r\n--b--\r\n"
    )
    async with replica(playing([whole(b"200 OK", b'{"text":"hi"}')])) as a, gateway(a) as g:
        client = await g.connect()
        await client.send(
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: g\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        assert (await client.answer()).body == b'{"text":"hi"}'
        client.close()
        assert a.seen[0].body == body
        assert a.seen[0].header(b"content-type") == b"multipart/form-data; boundary=b"
        record = await g.record()
        assert (record.model, record.outcome, record.partition) == ("tiny", "success", "good")


async def test_a_response_is_asked_for_where_it_was_made() -> None:
    created = chunk(b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_s"}}\n\n')
    delta = chunk(b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n')
    done = chunk(b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_s"}}\n\n')

    def script(name: bytes) -> object:
        async def serve(connection: Connection, request: Seen) -> None:
            if not request.line.startswith(b"POST /v1/responses "):
                await connection.send(whole(b"200 OK", b'{"by":"%b"}' % name))
            elif b'"stream":true' in request.body:
                await connection.send(STREAM_HEAD, created, delta, done, b"0\r\n\r\n")
            else:
                await connection.send(whole(b"200 OK", b'{"id":"resp_%b","status":"completed"}' % name))

        return serve

    async with replica(script(b"a")) as a, replica(script(b"b")) as b, gateway(a, b) as g:  # type: ignore[arg-type]
        makers = {}
        for _ in range(2):
            answer = await g.post("/v1/responses", b'{"model":"tiny","input":"x"}')
            makers[orjson.loads(answer.body)["id"]] = answer.header("x-forebay-replica")
        assert makers == {"resp_a": "r0", "resp_b": "r1"}
        streamed = await g.post("/v1/responses", b'{"model":"tiny","input":"x","stream":true}')
        makers["resp_s"] = streamed.header("x-forebay-replica")
        client = await g.connect()
        for made, by in list(makers.items()) * 3:
            await client.send(f"GET /v1/responses/{made} HTTP/1.1\r\nHost: g\r\n\r\n".encode())
            assert (await client.answer()).header("x-forebay-replica") == by
            await client.post(f"/v1/responses/{made}/cancel", b"")
            assert (await client.answer()).header("x-forebay-replica") == by
        client.close()


async def test_with_keys_configured_they_are_checked_and_never_passed_on() -> None:
    key = hashlib.sha256(b"secret").hexdigest()
    settings = f'[tenants.team]\nkeys_sha256 = ["{key}"]\n'
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a, settings=settings) as g:
        assert (await g.post("/v1/completions", WHOLE)).status == 401
        assert (await g.post("/v1/completions", WHOLE, "Authorization: Bearer wrong\r\n")).status == 401
        for header in ("Authorization: Bearer secret\r\n", "x-api-key: secret\r\n"):
            assert (await g.post("/v1/completions", WHOLE, header)).status == 200
            assert a.seen[-1].header(b"authorization") is None
            assert a.seen[-1].header(b"x-api-key") is None
        assert (await g.record(3)).tenant == "team"


async def test_what_is_refused_at_the_door_is_recorded_under_its_tenant_and_class() -> None:
    key = hashlib.sha256(b"secret").hexdigest()
    settings = f'limits.max_body_bytes = 100\n[tenants.team]\nkeys_sha256 = ["{key}"]\nclasses = ["standard"]\n'
    async with replica(playing(GOOD_WHOLE)) as a, gateway(a, settings=settings) as g:
        batch, secret = "x-service-class: batch\r\n", "x-api-key: secret\r\n"
        for body, header in (
            (WHOLE, secret + batch),  # not its class
            (WHOLE, "x-api-key: wrong\r\n" + batch),
            (WHOLE, "x-service-class: interactive\r\n"),
            (WHOLE, secret + "x-service-class: unheard-of\r\n"),
            (b" " * 200, secret + batch),
        ):
            await g.post("/v1/completions", body, header)
        await g.record(4)
        assert [(r.reason, r.tenant, r.service_class) for r in g.records] == [
            ("class_not_allowed", "team", "batch"),
            ("bad_key", None, "batch"),
            ("no_key", None, "interactive"),
            ("malformed", "team", "standard"),
            ("too_large", "team", "batch"),
        ]


async def test_cheap_calls_bypass_the_core() -> None:
    async with replica(playing([whole(b"200 OK", b'{"count":3}')])) as a, gateway(a) as g:
        for path in ("/tokenize", "/v1/messages/count_tokens"):
            answer = await g.post(path, WHOLE)
            assert (answer.body, answer.header("x-forebay-reason")) == (b'{"count":3}', "direct")
        assert g.scheduler.open == 0


@pytest.mark.parametrize("body", [CHAT, WHOLE], ids=["streamed", "whole"])
async def test_a_finished_request_leaves_nothing_to_the_garbage_collector(body: bytes) -> None:
    """A collection stops all streams for its length, so requests must not depend on it."""
    script = playing(GOOD_STREAM if body is CHAT else GOOD_WHOLE)
    async with replica(script) as a, gateway(a) as g:
        client = await g.connect()
        for _ in range(10):
            await client.post("/v1/chat/completions", body)
            await client.answer()
        g.records.clear()
        gc.collect()
        gc.disable()
        try:
            for _ in range(50):
                await client.post("/v1/chat/completions", body)
                await client.answer()
            g.records.clear()
            assert gc.collect() < 50
        finally:
            gc.enable()
            client.close()


async def test_shutdown_refuses_new_requests_and_finishes_streams() -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection, request: Seen) -> None:
        await connection.send(*GOOD_STREAM[:2])
        await go_on.wait()
        await connection.send(*GOOD_STREAM[2:])

    async with replica(script) as a, gateway(a) as g:
        client = await g.connect()
        await client.post("/v1/chat/completions", CHAT)
        await client.reader.readuntil(b"a")
        g.proxy.draining = True
        refused = await g.post("/v1/chat/completions", CHAT)
        assert (refused.status, orjson.loads(refused.body)["error"]["code"]) == (503, "draining")
        go_on.set()
        await client.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        client.close()


async def test_a_committed_stream_holds_its_prompt_no_longer() -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection, request: Seen) -> None:
        await connection.send(*GOOD_STREAM[:2])
        await go_on.wait()
        await connection.send(*GOOD_STREAM[2:])

    async with replica(script) as a, gateway(a, settings="journal.prompt_samples = true") as g:
        client = await g.connect()
        await client.post("/v1/chat/completions", CHAT)
        await client.reader.readuntil(b"a")
        (exchange,) = g.proxy.live
        assert exchange.admission is not None
        call = exchange.admission.call
        assert (call.body, call.parts, call.document, exchange.admission.request.text) == (b"", [], None, None)
        go_on.set()
        await client.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert (await g.record()).sample == CHAT
        client.close()

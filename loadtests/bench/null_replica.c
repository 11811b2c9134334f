/* A replica that costs nothing: answers as vLLM 0.32 frames its answers, with fixed bytes and no engine.
 *
 *     null_replica INTERVAL_US PORT [PORT ...]
 *
 * Not streamed: one chat completion at once. Streamed ("stream":true in the body): headers at once, the role event with the
 * first content event after INTERVAL_US, then one event per interval up to "max_tokens" (default 16), the usage event if
 * "include_usage" was asked, [DONE]. Each event is one HTTP chunk and one write. /metrics is as long as vLLM's (about 50 KB)
 * and its counters move, so that what a gateway spends on scraping is counted. One thread, epoll; every interval is the
 * same, so streams wait for their next event in one queue that is always in order of time. Usage: a token for four bytes
 * of body, of which all whole blocks of 16 but the last token's were cached, as they are where the same is asked again.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define ID "\"id\":\"chatcmpl-a0a37310abb798fd\",\"object\":\"chat.completion.chunk\",\"created\":1795969060,\"model\":\"null\""
#define ROLE "data: {" ID ",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}],\"prompt_token_ids\":null,\"prompt_text\":null}\n\n"
#define TEXT "data: {" ID ",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" river\"},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]}\n\n"
#define LAST "data: {" ID ",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" bank\"},\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":null}]}\n\n"
#define HEADERS "HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 16:17:40 GMT\r\nserver: uvicorn\r\ncontent-type: "

typedef struct conn {
    int fd, listening, streaming, usage, left, tokens, prompt, want_write;
    char *in, *out;
    size_t in_len, in_cap, out_len, out_cap, out_at;
    long long due;
    struct conn *next; /* in the queue of streams */
} conn;

static int ep;
static long long interval_us = 10000;
static conn *first, *last; /* streams by due time */
static long long running, generated, prompts;
static char *filler; /* the part of /metrics that no gateway reads */
static size_t filler_len;

static long long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void grow(char **buffer, size_t *cap, size_t need) {
    if (need <= *cap) return;
    while (*cap < need) *cap = *cap ? *cap * 2 : 4096;
    if (!(*buffer = realloc(*buffer, *cap))) abort();
}

static void dequeue(conn *c) {
    conn *previous = NULL;
    for (conn *p = first; p; previous = p, p = p->next)
        if (p == c) {
            if (previous) previous->next = c->next; else first = c->next;
            if (last == c) last = previous;
            break;
        }
    c->next = NULL;
}

static void enqueue(conn *c, long long due) {
    c->due = due;
    c->next = NULL;
    if (last) last->next = c; else first = c;
    last = c;
}

static void drop(conn *c) {
    if (c->streaming) { dequeue(c); running--; }
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

static int flush(conn *c) { /* 0: the connection is gone */
    while (c->out_at < c->out_len) {
        ssize_t n = send(c->fd, c->out + c->out_at, c->out_len - c->out_at, MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
        if (n < 0) return 0;
        c->out_at += n;
    }
    if (c->out_at == c->out_len) c->out_at = c->out_len = 0;
    int want = c->out_len > 0;
    if (want != c->want_write) {
        struct epoll_event e = {.events = EPOLLIN | (want ? EPOLLOUT : 0), .data.ptr = c};
        epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
        c->want_write = want;
    }
    return 1;
}

static void put(conn *c, const char *data, size_t n) {
    grow(&c->out, &c->out_cap, c->out_len + n);
    memcpy(c->out + c->out_len, data, n);
    c->out_len += n;
}

static void chunk(conn *c, const char *event, size_t n) {
    char size[16];
    put(c, size, snprintf(size, sizeof size, "%zx\r\n", n));
    put(c, event, n);
    put(c, "\r\n", 2);
}

static void answer(conn *c, const char *type, const char *body, size_t n) {
    char head[256];
    put(c, head, snprintf(head, sizeof head, HEADERS "%s\r\ncontent-length: %zu\r\n\r\n", type, n));
    put(c, body, n);
}

static int usage(char *out, size_t size, int prompt, int completion) {
    return snprintf(out, size, "\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d,"
        "\"prompt_tokens_details\":{\"cached_tokens\":%d}}", prompt, prompt + completion, completion, (prompt - 1) / 16 * 16);
}

static int event(conn *c) { /* the next event of a stream; 0: the connection is gone */
    if (c->left == c->tokens) chunk(c, ROLE, sizeof ROLE - 1);
    if (c->left > 1) chunk(c, TEXT, sizeof TEXT - 1); else chunk(c, LAST, sizeof LAST - 1);
    generated++;
    if (--c->left == 0) {
        if (c->usage) {
            char said[256], data[512];
            usage(said, sizeof said, c->prompt, c->tokens);
            chunk(c, data, snprintf(data, sizeof data, "data: {" ID ",\"choices\":[],%s}\n\n", said));
        }
        chunk(c, "data: [DONE]\n\n", 14);
        put(c, "0\r\n\r\n", 5);
        c->streaming = 0;
        running--;
    }
    return flush(c);
}

static void metrics(conn *c) {
    char *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    const char *names[] = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total",
                           "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total", "iteration_tokens_total_count"};
    double values[] = {running, 0, 0.01, prompts * 17.0, 0, prompts * 17.0, generated, 0, generated};
    for (int i = 0; i < 9; i++)
        fprintf(f, "# TYPE vllm:%s %s\nvllm:%s{engine=\"0\",model_name=\"null\"} %.1f\n", names[i], i < 3 ? "gauge" : "counter", names[i], values[i]);
    fprintf(f, "vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"True\",engine=\"0\",num_gpu_blocks=\"1000000\"} 1.0\n");
    fwrite(filler, 1, filler_len, f);
    fclose(f);
    answer(c, "text/plain; version=1.0.0; charset=utf-8", text, n);
    free(text);
}

static int has(const char *body, size_t n, const char *name, const char *value) { /* "name":value, with or without a space */
    const char *at = memmem(body, n, name, strlen(name));
    if (!at) return 0;
    at += strlen(name);
    while (at < body + n && (*at == ':' || *at == ' ')) at++;
    return (size_t)(body + n - at) >= strlen(value) && !memcmp(at, value, strlen(value));
}

static int serve(conn *c, const char *head, const char *body, size_t n) {
    if (!strncmp(head, "GET /metrics", 12)) metrics(c);
    else if (!strncmp(head, "GET /v1/models", 14)) {
        static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"null\",\"object\":\"model\",\"created\":1795969060,\"owned_by\":\"vllm\",\"root\":\"null\",\"parent\":null,\"max_model_len\":1048576}]}";
        answer(c, "application/json", models, sizeof models - 1);
    } else if (!strncmp(head, "GET /version", 12)) answer(c, "application/json", "{\"version\":\"0.32.0\"}", 20);
    else if (!strncmp(head, "GET ", 4)) answer(c, "text/plain", "", 0);
    else if (has(body, n, "\"stream\"", "true")) {
        const char *max = memmem(body, n, "\"max_tokens\"", 12);
        c->tokens = c->left = max ? atoi(max + 13 + (max[13] == ' ')) : 16;
        c->prompt = n / 4 + 1;
        c->usage = has(body, n, "\"include_usage\"", "true");
        static const char head_of_stream[] = HEADERS "text/event-stream; charset=utf-8\r\nvary: Origin\r\ntransfer-encoding: chunked\r\n\r\n";
        put(c, head_of_stream, sizeof head_of_stream - 1);
        c->streaming = 1;
        running++;
        prompts++;
        enqueue(c, now_us() + interval_us);
    } else {
        char said[256], done[1024];
        usage(said, sizeof said, n / 4 + 1, 2);
        answer(c, "application/json", done, snprintf(done, sizeof done,
            "{\"id\":\"chatcmpl-a0a37310abb798fd\",\"object\":\"chat.completion\",\"created\":1795969060,\"model\":\"null\",\"choices\":[{\"index\":0,"
            "\"message\":{\"role\":\"assistant\",\"content\":\" river bank\",\"refusal\":null,\"tool_calls\":[],\"reasoning\":null},\"logprobs\":null,"
            "\"finish_reason\":\"length\",\"stop_reason\":null}],%s,\"prompt_logprobs\":null}", said));
        prompts++;
        generated += 2;
    }
    return flush(c);
}

static int readable(conn *c) { /* 0: the connection is gone */
    for (;;) {
        grow(&c->in, &c->in_cap, c->in_len + 65536);
        ssize_t n = recv(c->fd, c->in + c->in_len, 65535, 0);
        if (n == 0) return 0;
        if (n < 0) return errno == EAGAIN || errno == EINTR;
        c->in_len += n;
        c->in[c->in_len] = 0;
        while (c->in_len && !c->streaming) {
            char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
            if (!end) break;
            end += 4;
            char kept = *end;
            *end = 0; /* header search stops at the body */
            char *length = strcasestr(c->in, "\r\ncontent-length:");
            int chunked = strcasestr(c->in, "\r\ntransfer-encoding:") != NULL;
            *end = kept;
            size_t body = length ? strtoul(length + 17, NULL, 10) : 0;
            if (chunked) {
                char *stop = memmem(end, c->in + c->in_len - end, "\r\n0\r\n\r\n", 7);
                if (!stop) break;
                body = stop + 7 - end;
            }
            size_t total = end - c->in + body;
            if (c->in_len < total) break;
            if (!serve(c, c->in, end, body)) return 0;
            memmove(c->in, c->in + total, c->in_len - total);
            c->in_len -= total;
        }
    }
}

static void listen_on(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 4096)) { perror("listen"); exit(1); }
    conn *c = calloc(1, sizeof *c);
    c->fd = fd;
    c->listening = 1;
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
}

int main(int argc, char **argv) {
    if (argc < 3) { fprintf(stderr, "usage: null_replica INTERVAL_US PORT [PORT ...]\n"); return 2; }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    interval_us = atoll(argv[1]);
    ep = epoll_create1(0);
    FILE *f = open_memstream(&filler, &filler_len);
    for (int h = 0; h < 18; h++)
        for (int b = 0; b < 36; b++)
            fprintf(f, "vllm:filler_%d_seconds_bucket{engine=\"0\",le=\"%d.0\",model_name=\"null\"} %d.0\n", h, b, h * b);
    fclose(f);
    for (int i = 2; i < argc; i++) listen_on(atoi(argv[i]));
    printf("ready\n");
    fflush(stdout);
    struct epoll_event events[512];
    for (;;) {
        long long wait = first ? first->due - now_us() : 1000000;
        struct timespec timeout = {wait > 0 ? wait / 1000000 : 0, wait > 0 ? wait % 1000000 * 1000 : 0};
        int n = epoll_pwait2(ep, events, 512, &timeout, NULL);
        for (int i = 0; i < n; i++) {
            conn *c = events[i].data.ptr;
            if (c->listening) {
                int fd, one = 1;
                while ((fd = accept4(c->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                    conn *d = calloc(1, sizeof *d);
                    d->fd = fd;
                    struct epoll_event e = {.events = EPOLLIN, .data.ptr = d};
                    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
                }
                continue;
            }
            int alive = 1;
            if (events[i].events & EPOLLOUT) alive = flush(c);
            if (alive && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) alive = readable(c);
            if (!alive) drop(c);
        }
        for (long long now = now_us(); first && first->due <= now;) {
            conn *c = first;
            dequeue(c);
            if (!event(c)) { drop(c); continue; }
            if (c->streaming) enqueue(c, c->due + interval_us);
        }
    }
}

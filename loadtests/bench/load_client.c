/* Load from one thread: N connections, each sending the same request again and again, one at a time.
 *
 *     load_client PORT CONNECTIONS SECONDS EACH STAGGER_US BODY_FILE [PERIOD_US]
 *
 * Each connection starts STAGGER_US after the one before it and stops after EACH answers (0: no limit) or when SECONDS have
 * passed (0: no limit); answers under way are awaited. Each sends its next request when it has an answer (a closed loop) or,
 * with PERIOD_US, at even times that far apart (an open loop, as long as answers take less than that). "########" in the body becomes a new number for each request, so
 * that no two prompts are equal. An answer counts only if it is 200 and whole: its length, or the last chunk and, for a
 * stream, `data: [DONE]`. Prints one JSON object: answers, events (`data:` lines but [DONE]), errors with the first one in
 * words, seconds, and the 50th and 99th percentile of the latency in microseconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { HEAD, FIXED, SIZE, DATA, DATA_END, TRAILER };

typedef struct {
    int fd, over, state, stream, done, answers, matched;
    char head[8192], line[64];
    size_t head_len, line_len, left, out_at;
    long long start_at, sent_at, due_at;
} conn;

static int ep, port, each, live;
static long long deadline, period;
static char *request, *number_at; /* one buffer for all: a number changed under a half-sent request is still a new number */
static size_t request_len;
static unsigned number;
static long long answers, events, errors;
static char first_error[200];
static int *latency;
static size_t latency_cap;

static long long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void watch(conn *c, int op, unsigned bits) {
    struct epoll_event e = {.events = bits, .data.ptr = c};
    epoll_ctl(ep, op, c->fd, &e);
}

static void fail(conn *c, const char *what) { /* the connection starts anew in 10 ms */
    if (!errors++) {
        snprintf(first_error, sizeof first_error, "%s", what);
        for (char *p = first_error; *p; p++)
            if (*p < ' ' || *p == '"' || *p == '\\') *p = ' ';
    }
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    c->answers++;
    c->start_at = now_us() + 10000;
}

static void pump(conn *c) { /* sends what is left of the request */
    int waited = c->out_at > 0;
    while (c->out_at < request_len) {
        ssize_t n = send(c->fd, request + c->out_at, request_len - c->out_at, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) {
            watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
            return;
        }
        if (n < 0) {
            fail(c, strerror(errno));
            return;
        }
        c->out_at += n;
    }
    if (waited) watch(c, EPOLL_CTL_MOD, EPOLLIN);
}

static void begin(conn *c) {
    if ((each && c->answers >= each) || (deadline && now_us() >= deadline)) {
        if (c->fd >= 0) close(c->fd);
        c->fd = -1;
        c->over = 1;
        live--;
        return;
    }
    c->due_at = period ? c->start_at + period : 0;
    c->start_at = 0;
    if (c->fd < 0) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        int one = 1;
        c->fd = socket(AF_INET, SOCK_STREAM, 0);
        if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&a, sizeof a)) {
            fail(c, strerror(errno));
            return;
        }
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        fcntl(c->fd, F_SETFL, O_NONBLOCK);
        watch(c, EPOLL_CTL_ADD, EPOLLIN);
    }
    if (number_at) {
        char digits[16];
        snprintf(digits, sizeof digits, "%08u", number++ % 100000000u);
        memcpy(number_at, digits, 8);
    }
    c->out_at = c->head_len = c->line_len = 0;
    c->state = HEAD;
    c->stream = c->done = c->matched = 0;
    c->sent_at = now_us();
    pump(c);
}

static void count(conn *c, const char *data, size_t n) { /* events: "data: " at the start of a line; "[DONE]" ends the stream */
    static const char mark[] = "\ndata: ";
    for (size_t i = 0; i < n; i++) {
        if (c->matched == 7) {
            if (data[i] == '[') c->done = 1; else events++;
            c->matched = 0;
        } else if (data[i] == mark[c->matched]) c->matched++;
        else c->matched = data[i] == '\n';
        if (!c->matched) { /* skip to the end of the line */
            const char *next = memchr(data + i, '\n', n - i);
            if (!next) return;
            i = next - data;
            c->matched = 1;
        }
    }
}

static void whole(conn *c) {
    if (c->stream && !c->done) {
        fail(c, "a stream ended without [DONE]");
        return;
    }
    if ((size_t)answers == latency_cap) {
        latency_cap = latency_cap ? latency_cap * 2 : 65536;
        if (!(latency = realloc(latency, latency_cap * sizeof *latency))) abort();
    }
    latency[answers++] = (int)(now_us() - c->sent_at);
    c->answers++;
    if (!period) begin(c);
    else c->start_at = c->due_at > now_us() ? c->due_at : now_us();
}

static int head(conn *c) { /* 0: failed */
    char *length = strcasestr(c->head, "\r\ncontent-length:");
    if (strncmp(c->head, "HTTP/1.1 200", 12)) {
        fail(c, c->head);
        return 0;
    }
    c->stream = strcasestr(c->head, "text/event-stream") != NULL;
    c->matched = 1; /* the body starts a line */
    c->left = length ? strtoul(length + 17, NULL, 10) : 0;
    c->state = strcasestr(c->head, "\r\ntransfer-encoding:") ? SIZE : FIXED;
    return 1;
}

static void readable(conn *c) {
    static char data[262144];
    ssize_t n = recv(c->fd, data, sizeof data, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        fail(c, n ? strerror(errno) : "closed before the end of an answer");
        return;
    }
    for (char *p = data, *end = data + n; p < end;) {
        if (c->state == HEAD) {
            if (c->head_len + 1 >= sizeof c->head) {
                fail(c, "the head of an answer is too long");
                return;
            }
            c->head[c->head_len++] = *p++;
            c->head[c->head_len] = 0;
            if (c->head_len < 4 || memcmp(c->head + c->head_len - 4, "\r\n\r\n", 4)) continue;
            if (!head(c)) return;
            if (c->state == FIXED && !c->left) {
                whole(c);
                return;
            }
        } else if (c->state == FIXED || c->state == DATA) {
            size_t take = (size_t)(end - p) < c->left ? (size_t)(end - p) : c->left;
            if (c->stream) count(c, p, take);
            p += take;
            if (c->left -= take) continue;
            if (c->state == FIXED) {
                whole(c);
                return;
            }
            c->state = DATA_END;
        } else { /* a line: the size of a chunk, the end of one, or the last line of all */
            char ch = *p++;
            if (ch != '\n') {
                if (c->line_len < sizeof c->line - 1) c->line[c->line_len++] = ch;
                continue;
            }
            c->line[c->line_len] = 0;
            c->line_len = 0;
            if (c->state == DATA_END) c->state = SIZE;
            else if (c->state == SIZE) {
                c->left = strtoul(c->line, NULL, 16);
                c->state = c->left ? DATA : TRAILER;
            } else if (c->line[0] == '\r') {
                whole(c);
                return;
            }
        }
    }
}

static int by_size(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

int main(int argc, char **argv) {
    if (argc != 7 && argc != 8) {
        fprintf(stderr, "usage: load_client PORT CONNECTIONS SECONDS EACH STAGGER_US BODY_FILE [PERIOD_US]\n");
        return 2;
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    port = atoi(argv[1]);
    int connections = live = atoi(argv[2]);
    double seconds = atof(argv[3]);
    each = atoi(argv[4]);
    long long stagger = atoll(argv[5]);
    period = argc == 8 ? atoll(argv[7]) : 0;
    FILE *f = fopen(argv[6], "rb");
    if (!f) {
        perror(argv[6]);
        return 1;
    }
    fseek(f, 0, SEEK_END);
    size_t body_len = ftell(f);
    rewind(f);
    request = malloc(body_len + 512);
    int head_len = sprintf(request, "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\naccept: */*\r\n"
        "content-length: %zu\r\n\r\n", port, body_len);
    request_len = head_len + fread(request + head_len, 1, body_len, f);
    number_at = memmem(request, request_len, "########", 8);

    ep = epoll_create1(0);
    long long start = now_us(), woken = 0;
    deadline = seconds > 0 ? start + (long long)(seconds * 1e6) : 0;
    conn *all = calloc(connections, sizeof *all);
    for (int i = 0; i < connections; i++) {
        all[i].fd = -1;
        all[i].start_at = start + i * stagger;
    }
    struct epoll_event ready[512];
    int timer = -1; /* for even times the 1 ms of epoll is too coarse */
    if (period) {
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL};
        timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
        epoll_ctl(ep, EPOLL_CTL_ADD, timer, &e);
    }
    while (live > 0) {
        int n = epoll_wait(ep, ready, 512, period && woken ? -1 : 1);
        for (int i = 0; i < n; i++) {
            conn *c = ready[i].data.ptr;
            if (!c) continue;
            if (c->fd >= 0 && ready[i].events & EPOLLOUT) pump(c);
            if (c->fd >= 0 && ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
        }
        long long now = now_us();
        if (!period && now - woken < 500) continue;
        woken = now;
        for (int i = 0; i < connections; i++)
            if (!all[i].over && all[i].start_at && all[i].start_at <= now) begin(&all[i]);
        if (!period) continue;
        long long next = now + 10000;
        for (int i = 0; i < connections; i++)
            if (!all[i].over && all[i].start_at && all[i].start_at < next) next = all[i].start_at;
        struct itimerspec at = {.it_value = {next / 1000000, next % 1000000 * 1000}};
        timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
    }
    qsort(latency, answers, sizeof *latency, by_size);
    printf("{\"answers\": %lld, \"events\": %lld, \"errors\": %lld, \"first_error\": \"%s\", \"seconds\": %.6f, \"p50_us\": %d, \"p99_us\": %d}\n", answers, events,
        errors, first_error, (now_us() - start) / 1e6, answers ? latency[answers / 2] : 0, answers ? latency[answers * 99 / 100] : 0);
    return 0;
}

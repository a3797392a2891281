// Package check has the helpers that tests of every kind use.
package check

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// fatal is what the helpers need of a test.
type fatal interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// limit is how long Eventually waits. It is far above what any event takes on a
// loaded machine, because a test that passes never waits it out.
const limit = 2 * time.Minute

// skipping is a test that can be skipped.
type skipping interface {
	fatal
	Skip(args ...any)
}

// Needs skips a test for which the machine lacks something, and has it fail in CI.
func Needs(t skipping, has bool, what string) {
	t.Helper()
	if !has {
		Require(t, os.Getenv("CI") != "true", "missing: %s", what)
		t.Skip("missing: " + what)
	}
}

// NeedsRoot is Needs for what only root can do.
func NeedsRoot(t skipping) {
	t.Helper()
	Needs(t, os.Geteuid() == 0, "root")
}

// Must ends the test when there is an error.
func Must(t fatal, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Value gives what a call returned, and ends the test where it returned an error: check.Value(os.ReadFile(path))(t).
func Value[T any](value T, err error) func(fatal) T {
	return func(t fatal) T {
		t.Helper()
		Must(t, err)
		return value
	}
}

// Code ends the test unless an error has a code, and says some words.
func Code(t fatal, err error, want codes.Code, words ...string) {
	t.Helper()
	got := status.Code(err)
	Require(t, got == want, "got %v (%v); want %v", got, err, want)
	if len(words) > 0 {
		Fails(t, err, words...)
	}
}

// Err gives the error of a call that returns a value too: check.Fails(t, check.Err(os.Stat(path))).
func Err[T any](_ T, err error) error { return err }

// Fails ends the test unless there is an error, and it says some words.
func Fails(t fatal, err error, words ...string) {
	t.Helper()
	Require(t, err != nil, "there is no error; want one that says %q", words)
	for _, word := range words {
		Require(t, strings.Contains(err.Error(), word), "the error does not say %q: %v", word, err)
	}
}

// Kind ends the test unless an error has a kind, and says some words.
func Kind(t fatal, err error, want volume.Kind, words ...string) {
	t.Helper()
	Fails(t, err, words...)
	Require(t, volume.KindOf(err) == want, "got %v of kind %v; want %v", err, volume.KindOf(err), want)
}

// Is ends the test unless an error is the wanted one.
func Is(t fatal, err, want error) {
	t.Helper()
	Require(t, errors.Is(err, want), "got %v; want %v", err, want)
}

// failing is a test that can go on when it has failed.
type failing interface {
	Helper()
	Errorf(format string, args ...any)
}

// That has the test fail, and go on, where something does not hold.
func That(t failing, holds bool, format string, args ...any) {
	t.Helper()
	if !holds {
		t.Errorf(format, args...)
	}
}

// Require ends the test where something does not hold that the rest of it needs.
func Require(t fatal, holds bool, format string, args ...any) {
	t.Helper()
	if !holds {
		t.Fatalf(format, args...)
	}
}

// Equal has the test fail where a value is not the wanted one, and says what it is.
func Equal[T comparable](t failing, got, want T, what string, args ...any) {
	t.Helper()
	That(t, got == want, "%s: got %v; want %v", fmt.Sprintf(what, args...), got, want)
}

// NoError has the test fail, and go on, where there is an error, and says of what.
func NoError(t failing, err error, what string, args ...any) {
	t.Helper()
	That(t, err == nil, "%s: %v", fmt.Sprintf(what, args...), err)
}

// Empty has the test fail where a list has elements, and says which.
func Empty[E any](t failing, list []E, what string, args ...any) {
	t.Helper()
	That(t, len(list) == 0, "%s: %+v", fmt.Sprintf(what, args...), list)
}

// Same has the test fail where there is a difference, as cmp.Diff shows it.
func Same(t failing, diff, what string, args ...any) {
	t.Helper()
	That(t, diff == "", "%s:\n%s", fmt.Sprintf(what, args...), diff)
}

// Says has the test fail where a text lacks a word.
func Says(t failing, what, text string, words ...string) {
	t.Helper()
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%s does not say %q:\n%s", what, word, text)
		}
	}
}

// Run runs a program that must succeed, and gives what it wrote.
func Run(t fatal, cmd *exec.Cmd) string {
	t.Helper()
	out, err := cmd.CombinedOutput()
	Require(t, err == nil, "%q: %v\n%s", cmd.Args, err, out)
	return string(out)
}

// ending is a test that does something at its end.
type ending interface {
	fatal
	failing
	Cleanup(end func())
}

// ShortDir makes a directory for sockets, whose paths have 107 bytes at most.
func ShortDir(t ending) string {
	t.Helper()
	dir := Value(os.MkdirTemp("", "t"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return Value(filepath.EvalSymlinks(dir))(t)
}

// StaleSocket leaves a socket that nobody serves.
func StaleSocket(t fatal, path string) {
	t.Helper()
	l := Value(net.ListenUnix("unix", &net.UnixAddr{Name: path}))(t)
	l.SetUnlinkOnClose(false)
	Must(t, l.Close())
}

// Within is a context of the test that ends after some time.
func Within(t interface {
	Context() context.Context
	Cleanup(end func())
}, limit time.Duration,
) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// Begin calls a function beside the test, and gives its error once that has ended.
func Begin(call func() error) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- call() }()
	return ended
}

// Running runs something beside the test, until stop is called or the test ends.
func Running(t ending, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := Begin(func() error { return run(ctx) })
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			NoError(t, err, "what ran beside the test")
		case <-time.After(limit):
			t.Errorf("what ran beside the test does not end")
		}
	})
	t.Cleanup(stop)
	return stop
}

// Eventually waits until a condition holds, and ends the test when it never does.
func Eventually(t fatal, what string, is func() bool) {
	t.Helper()
	Succeeds(t, what, func() error {
		if is() {
			return nil
		}
		return errNot
	})
}

// Succeeds is Eventually for what can say why it does not hold yet: the error of the last try is shown.
func Succeeds(t fatal, what string, try func() error) {
	t.Helper()
	if err := Until(limit, 5*time.Millisecond, try); err != nil {
		t.Fatalf("%s: not within %v: %v", what, limit, err)
	}
}

// Retried repeats a call as kubelet does, while the answer is that it may be tried again.
func Retried(t fatal, what string, call func() error) {
	t.Helper()
	Succeeds(t, what, func() error {
		err := call()
		if code := status.Code(err); err != nil && code != codes.Aborted && code != codes.Unavailable {
			t.Fatalf("%s: %v", what, err)
		}
		return err
	})
}

var errNot = errors.New("it does not hold")

// Until tries again and again until there is no error. When the time is over, it gives the error of the last try.
func Until(limit, pause time.Duration, try func() error) error {
	for deadline := time.Now().Add(limit); ; time.Sleep(pause) {
		if err := try(); err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// Left waits until a list is empty, and gives what stays on it.
func Left[E any](limit, pause time.Duration, list func() []E) (left []E) {
	_ = Until(limit, pause, func() error {
		if left = list(); len(left) > 0 {
			return errNot
		}
		return nil
	})
	return left
}

// WithoutDescriptors runs do while this process cannot open any file. No other test of it may run meanwhile.
func WithoutDescriptors(t fatal, do func()) {
	t.Helper()
	var was unix.Rlimit
	Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &was))
	defer func() { Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &was)) }()
	Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1, Max: was.Max}))
	do()
}

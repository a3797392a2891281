// Package check has the helpers that tests of every kind use.
package check

import (
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// fatal is what the helpers need of a test.
type fatal interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// limit is how long Eventually waits. It is far above what any event takes on a
// loaded machine, because a test that passes never waits it out.
const limit = time.Minute

// Must ends the test when there is an error.
func Must(t fatal, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Code ends the test unless an error has a code, and says some words.
func Code(t fatal, err error, want codes.Code, words ...string) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Fatalf("got %v (%v); want %v", got, err, want)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Fatalf("the error does not say %q: %v", word, err)
		}
	}
}

// Eventually waits until a condition holds, and ends the test when it never does.
func Eventually(t fatal, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

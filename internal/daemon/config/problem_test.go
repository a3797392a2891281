package config

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

// TestEachProblemIsALogRecord with its place, and a file of many does not fill the log.
func TestEachProblemIsALogRecord(t *testing.T) {
	bad := &FileError{File: "/etc/c.yaml", Problems: []Problem{{Line: 3, Column: 5, Key: "relay.concurrency", Text: "is wrong"}}}
	for n := range mostLogged {
		bad.Problems = append(bad.Problems, Problem{Text: fmt.Sprint(n)})
	}
	core, logs := observer.New(zapcore.DebugLevel)
	bad.Log(zap.New(core), "the configuration is bad")
	all := logs.All()
	want := map[string]any{"file": "/etc/c.yaml", "line": int64(3), "column": int64(5), "key": "relay.concurrency", "problem": "is wrong"}
	if diff := cmp.Diff(want, all[0].ContextMap()); diff != "" || len(all) != mostLogged+1 || all[mostLogged].ContextMap()["problem"] != "and 1 more" {
		t.Errorf("%d records: %s", len(all), diff)
	}
}

// TestHostileTextIsEscaped: nothing in a file may steer the terminal of who reads about it.
func TestHostileTextIsEscaped(t *testing.T) {
	for _, p := range problemsOf(errors.Join(errors.New("a\x1b[31m\nb\u202e\xff"), errors.New("policy.rules[0] (\"x: y\").name: \x07"))) {
		if printable(p.Text) != p.Text || printable(p.Key) != p.Key {
			t.Errorf("%q, %q", p.Key, p.Text)
		}
	}
}

package config

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/crust-proxy/crust-proxy/test/check"
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
	diff := cmp.Diff(want, all[0].ContextMap())
	check.That(t, diff == "" && len(all) == mostLogged+1 && all[mostLogged].ContextMap()["problem"] == "and 1 more", "%d records: %s", len(all), diff)
}

// TestHostileTextIsEscaped: nothing in a file may steer the terminal of who reads about it.
func TestHostileTextIsEscaped(t *testing.T) {
	for _, p := range problemsOf(errors.Join(errors.New("a\x1b[31m\nb\u202e\xff"), errors.New("policy.rules[0] (\"x: y\").name: \x07"))) {
		check.That(t, printable(p.Text) == p.Text && printable(p.Key) == p.Key, "%q, %q", p.Key, p.Text)
	}
}

// TestAllProblemsOfAFileAtOnce each with its place, in the order of the file.
func TestAllProblemsOfAFileAtOnce(t *testing.T) {
	for _, c := range []struct{ name, file, want string }{
		{"each kind", `runDir: run
relay:
  statsTimeout: soon
  concurency: 3
  maxSlow: 0
log: {level: loud, colour: red}
policy:
  rules:
  - name: a
    drivers: ebs
    handler: runc
  - null
authorization:
  admin: {uids: [0, x]}
front: {enabled: yes}
front: {}
"a\e[31m": 1
---
more: 1
`, `
1:1: runDir: "run" is not an absolute, clean path
3:3: relay.statsTimeout: soon is not a duration: write one like "10s"
4:3: relay.concurency: unknown key; did you mean concurrency?
5:3: relay.maxSlow: 0 is not between 1 and 65536
6:7: log.level: "loud" is none of debug, info, warn, error
6:20: log.colour: unknown key; the keys here are level
9:5: policy.rules[0] ("a").defer: is missing: say true or false
10:5: policy.rules[0].drivers: text cannot stand here; it takes a list
12:5: policy.rules[1]: an empty value cannot stand here; it takes a map of keys and values
14:21: authorization.admin.uids[1]: text cannot stand here; it takes a whole number from 0 to 4294967295
16:1: front: is there twice: the first is in line 15
17:1: ["a\x1b[31m"]: unknown key; the keys here are runDir, kubeletRoot, runtimeSocket, adminSocket, authorization, ` +
			`devices, handlers, front, policy, cluster, containerd, cri, relay, reconcileInterval, http, tracing, log, shutdownTimeout
18:1: there is more than one YAML document: remove all from the second --- on`},
		{"rules", `policy:
  rules:
  - {name: a, defer: true, handler: runc}
  - name: "b: c"
    defer: true
    runtimeHandlers: [kata, K]
`, `
3:28: policy.rules[0] ("a").handler: "runc" is not configured; the handlers here are: kata
4:5: policy.rules[1] ("b: c").name: it is empty, longer than 63 characters, or not of letters, digits, spaces and ._/-: ` +
			`records and errors name the rule by it
4:5: policy.rules[1] ("b: c"): it can never match, because policy.rules[0] ("a") stands before it and takes all that it would: put it first, or take it out
6:29: policy.rules[1] ("b: c").runtimeHandlers[1]: "K" is not a handler of a RuntimeClass`},
		{"a key above", "handlers:\n  kata:\n    tempDir: /run/kata-containers/shared/direct-volumes\n  crust: {root: /run/kata-containers}\n", `
3:5: handlers.kata.tempDir: "/run/kata-containers/shared/direct-volumes" lies in directVolumes, where Kata takes every file for a sandbox
4:11: handlers.crust.root: "/run/kata-containers" and handlers.kata.directVolumes lie in each other`},
		{"merged keys", "authorization:\n  admin: &who {uids: [0], gid: [1]}\n  csi: {<<: *who, uids: [1]}\n", `
2:27: authorization.admin.gid: unknown key; did you mean gids?
2:27: authorization.csi.gid: unknown key; did you mean gids?`},
		{"two merges, of which the library takes one", "policy:\n  rules:\n" +
			"    - &a {name: a, drivers: [d1], defer: true}\n    - &b {name: b, drivers: [d2], defer: true}\n    - {<<: *a, <<: *b, name: c}\n", `
5:16: policy.rules[2].<<: is there twice: merge one map, by its alias`},
		{"no end", "log: {level: info\nrunDir: /x\n", `
2:7: this is not valid YAML: did not find expected ',' or '}' (while parsing a flow mapping that begins in line 1)`},
		{"no text", "runDir: /a\nlog: \x01", `
2:6: this is not valid YAML: control characters are not allowed (value: 1)`},
		{"no anchor", "runDir: *x", `
1:9: this is not valid YAML: unknown anchor 'x' referenced`},
	} {
		_, err := load(t, c.file)
		bad, ok := errors.AsType[*FileError](err)
		check.Require(t, ok, "%s: got %v", c.name, err)
		check.Same(t, cmp.Diff(c.want, strings.ReplaceAll("\n"+bad.Error(), "\n"+bad.File+":", "\n")), "%s", c.name)
	}
}

// TestAFlagHasNoPlaceInTheFile even where the file has the key too.
func TestAFlagHasNoPlaceInTheFile(t *testing.T) {
	_, err := load(t, "runDir: /run/a\nlog: {level: loud}\n", "--run-dir", "x", "--admin-socket", "y")
	bad, _ := errors.AsType[*FileError](err)
	want := []Problem{
		{2, 7, "log.level", `"loud" is none of debug, info, warn, error`},
		{0, 0, "runDir", `"x" is not an absolute, clean path`},
		{0, 0, "adminSocket.path", `"y" is not an absolute, clean path`},
	}
	check.Same(t, cmp.Diff(want, bad.Problems), "-want +got")
}

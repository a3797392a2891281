package config

import (
	"strings"
	"testing"
)

// TestWrongTypesAreToldInTheFilesTerms: who writes YAML need not know Go.
func TestWrongTypesAreToldInTheFilesTerms(t *testing.T) {
	for file, want := range map[string]string{
		"front: {enabled: maybe}":                   "front.enabled: text cannot stand here; it takes true or false",
		"handlers: {kata: []}":                      "handlers.kata: a list cannot stand here; it takes a map of keys and values",
		"policy: {rules: 3}":                        "policy.rules: a number cannot stand here; it takes a list",
		"policy: {rules: [{defer: true, grow: 3}]}": "policy.rules[0].grow: a number cannot stand here; it takes true or false",
		"policy: {runtimes: [a]}":                   "policy.runtimes: a list cannot stand here; it takes a map of keys and values",
		"relay: {concurrency: 1.5}":                 "relay.concurrency: 1.5 cannot stand here; it takes a whole number",
		"authorization: {admin: {uids: [-1]}}":      "authorization.admin.uids[0]: -1 cannot stand here; it takes a whole number from 0 to 4294967295",
		"tracing: {sampleRatio: x}":                 "tracing.sampleRatio: text cannot stand here; it takes a number",
		"runtimeSocket: {mode: 0600}":               "runtimeSocket.mode: a number cannot stand here; it takes text (quote text",
		"policy: {runtimes: {kata: 3}}":             `policy.runtimes["kata"]: a number cannot stand here; it takes text (quote text`,
		"relay: {statsTimeout: 10}":                 `relay.statsTimeout: 10 is not a duration: write one like "10s"`,
		"front:\n\tenabled: true":                   "this is not valid YAML: line 2: found character that cannot start any token (a tab?",
		"front: {}\nfront: {}":                      `this is not valid YAML: line 2: key "front" is there twice`,
		"handlers: {kata: {enabled: {on: yes}}}":    "handlers.kata.enabled: a map of keys and values cannot stand here; it takes true or false",
	} {
		if _, err := load(t, file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s\ngot %v\nwant %s", file, err, want)
		}
	}
}

// TestNoHandlerLeft: no empty list is shown of what is left.
func TestNoHandlerLeft(t *testing.T) {
	_, err := load(t, "{handlers: {kata: {enabled: false}, default: kata}, policy: {rules: [{name: r, defer: true, handler: kata}]}}")
	if err == nil {
		t.Fatal("it was accepted")
	}
	for line := range strings.Lines(err.Error()) {
		if line = strings.TrimSpace(line); strings.HasSuffix(line, " of") || strings.HasSuffix(line, ":") {
			t.Errorf("it is said of an empty list: %s", line)
		}
	}
}

func TestWarnings(t *testing.T) {
	const (
		front   = "front: {enabled: true}\n"
		cluster = "cluster: {inCluster: true}\n"
		rule    = "policy: {rules: [{name: a, runtimeHandlers: [kata], defer: true}]}\n"
		always  = "policy: {rules: [{name: a, defer: true}]}\n"
	)
	for file, want := range map[string]string{
		"":                      "",
		always:                  "front.enabled is false",
		front + always:          "",
		front + rule:            `policy.rules[0] ("a").runtimeHandlers: no pod's runtime is known here`,
		front + cluster + rule:  "",
		"reconcileInterval: 0s": "reconcileInterval: 0 is never",
		"front: {privateDir: /var/lib/kubelet/plugins/x}":                                 "front.privateDir: it is not below",
		"front: {privateDir: /var/lib/kubelet/plugins/kubernetes.io/csi/crust-proxy.dev}": "", // the default of older files
	} {
		cfg, err := load(t, file)
		if err != nil {
			t.Fatal(err)
		}
		got := strings.Join(cfg.Warnings(), "\n")
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%s\ngot %q\nwant %q", file, got, want)
		}
	}
}

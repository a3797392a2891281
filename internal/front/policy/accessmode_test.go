package policy

import (
	"slices"
	"strings"
	"testing"
)

// TestAccessModesOfClaims goes over what kubelet sends for each mode of a claim.
func TestAccessModesOfClaims(t *testing.T) {
	// By the claim's mode: what a driver gets that reports SINGLE_NODE_MULTI_WRITER,
	// and what every other driver gets.
	sent := map[string][2]string{
		"ReadWriteOnce":    {"SINGLE_NODE_MULTI_WRITER", "SINGLE_NODE_WRITER"},
		"ReadWriteOncePod": {"SINGLE_NODE_SINGLE_WRITER", "SINGLE_NODE_WRITER"},
		"ReadOnlyMany":     {"MULTI_NODE_READER_ONLY", "MULTI_NODE_READER_ONLY"},
		"ReadWriteMany":    {"MULTI_NODE_MULTI_WRITER", "MULTI_NODE_MULTI_WRITER"},
	}
	for word, matches := range map[string][]string{ // the modes of claims that a rule matches, with (+) or without the capability
		"SINGLE_NODE_WRITER":        {"ReadWriteOnce+", "ReadWriteOnce", "ReadWriteOncePod"},
		"SINGLE_NODE_MULTI_WRITER":  {"ReadWriteOnce+"},
		"SINGLE_NODE_SINGLE_WRITER": {"ReadWriteOncePod+"},
		"ReadWriteOnce":             {"ReadWriteOnce+", "ReadWriteOnce", "ReadWriteOncePod"},
		"ReadWriteOncePod":          {"ReadWriteOncePod+"},
		"ReadOnlyMany":              {"ReadOnlyMany+", "ReadOnlyMany"},
		"ReadWriteMany":             {"ReadWriteMany+", "ReadWriteMany"},
		"MULTI_NODE_SINGLE_WRITER":  nil,
	} {
		policy := &Policy{Rules: []Rule{{Name: "r", AccessModes: []string{word}, Defer: true}}}
		if err := policy.Validate([]string{"kata"}); err != nil {
			t.Errorf("%s is refused in a rule: %v", word, err)
		}
		for claim, modes := range sent {
			for i, mode := range modes {
				name := claim + []string{"+", ""}[i]
				verdict, err := policy.Decide(Input{Driver: "d", AccessMode: mode})
				if want := slices.Contains(matches, name); err != nil || verdict.Defer != want {
					t.Errorf("a rule by %s, a volume by %s, sent as %s: deferred: %v (%v), want %v", word, name, mode, verdict.Defer, err, want)
				}
			}
		}
	}
}

func TestAccessModesAreExplained(t *testing.T) {
	policy := &Policy{Rules: []Rule{
		{Name: "pod", AccessModes: []string{"ReadWriteOncePod", "MULTI_NODE_SINGLE_WRITER"}, Defer: true},
		{Name: "once", AccessModes: []string{"SINGLE_NODE_WRITER"}, Defer: true},
	}}
	got := policy.Explain()
	if len(got) != 2 || !strings.HasPrefix(got[0], `policy.rules[0] ("pod").accessModes: ReadWriteOncePod matches SINGLE_NODE_SINGLE_WRITER`) ||
		!strings.Contains(got[1], "SINGLE_NODE_MULTI_WRITER") {
		t.Errorf("got %q", got)
	}
}

func TestARuleBehindOneOfTheSameAccessModesIsRefused(t *testing.T) {
	rules := func(first, second string) *Policy {
		return &Policy{Rules: []Rule{{Name: "a", AccessModes: []string{first}, Defer: true}, {Name: "b", AccessModes: []string{second}, Defer: true}}}
	}
	if err := rules("ReadWriteOnce", "SINGLE_NODE_WRITER").Validate(nil); err == nil || !strings.Contains(err.Error(), "can never match") {
		t.Errorf("a rule that can never match is taken: %v", err)
	}
	// A configuration that was valid before stays so.
	if err := rules("SINGLE_NODE_WRITER", "SINGLE_NODE_MULTI_WRITER").Validate(nil); err != nil {
		t.Errorf("two rules by CSI's names: %v", err)
	}
}

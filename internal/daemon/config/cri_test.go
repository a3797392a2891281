package config

import (
	"strings"
	"testing"
)

func TestCRIExcludesContainerd(t *testing.T) {
	cases := map[string]struct {
		yaml string
		want string // what the error says; empty is none
	}{
		"CRI-O":            {"containerd: {socket: ''}\ncri: {socket: /run/crio/crio.sock}", ""},
		"containerd":       {"containerd: {socket: /run/c.sock}", ""},
		"neither":          {"containerd: {socket: ''}", ""},
		"both":             {"containerd: {socket: /run/c.sock}\ncri: {socket: /run/crio/crio.sock}", "set containerd.socket to \"\""},
		"one is default":   {"cri: {socket: /run/crio/crio.sock}", "set containerd.socket to \"\""},
		"not absolute":     {"containerd: {socket: ''}\ncri: {socket: crio.sock}", "cri.socket: \"crio.sock\""},
		"more than a name": {"containerd: {socket: ''}\ncri: {socket: /" + strings.Repeat("x", 200) + "}", "cri.socket: 201 bytes"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			cfg, err := Parse([]byte(c.yaml))
			if err != nil {
				t.Fatal(err)
			}
			err = cfg.Validate()
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

package sandbox

import (
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

func TestSandboxesThatAreNoContainersAreWarnedOf(t *testing.T) {
	cases := map[string]struct {
		sandboxers []string
		warns      bool
	}{
		"of before an upgrade": {[]string{""}, false},
		"the usual one":        {[]string{"podsandbox", "podsandbox"}, false},
		"another one":          {[]string{"podsandbox", "shim"}, true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			core, logs := observer.New(zap.WarnLevel)
			fake := newFake(t)
			fake.sandboxers = c.sandboxers
			fake.start()
			defer fake.stop()
			tracker := New(Config{Namespace: "k8s.io"}, zap.New(core))
			conn := connect(t, fake.socket)
			defer func() { _ = conn.Close() }()
			f := &follower{t: tracker, c: newClient(tracker, conn)}
			f.warnOfOthers(t.Context())
			f.warnOfOthers(t.Context())
			warned := logs.FilterMessageSnippet("cri.socket").FilterField(zap.String("sandboxer", "shim")).Len()
			if logs.Len() != warned || c.warns != (warned == 1) {
				t.Errorf("the log: %v", logs.All())
			}
		})
	}
}

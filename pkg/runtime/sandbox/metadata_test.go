package sandbox

import (
	"fmt"
	"strings"
	"testing"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// written is the extension as containerd 1.6, 1.7 and 2.x write it, shortened.
const written = `{"Version":"v1","Metadata":{"ID":"sb-1","Name":"web_default_pod-1_0",` +
	`"Config":{"metadata":{"name":"web","uid":"pod-1"},"annotations":{"token":"s3cret"}},` +
	`"NetNSPath":"/var/run/netns/cni-1","IP":"10.0.0.2","RuntimeHandler":"crust","CNIResult":null,"ProcessLabel":""}}`

func withMetadata(text string) map[string]*anypb.Any {
	return map[string]*anypb.Any{
		metadataExtension: {TypeUrl: "github.com/containerd/cri/pkg/store/sandbox/Metadata", Value: []byte(text)},
	}
}

func TestHandlerOfASandbox(t *testing.T) {
	cases := map[string]struct {
		extensions map[string]*anypb.Any
		handler    string
		known      bool
	}{
		"as it is written":    {withMetadata(written), "crust", true},
		"the default handler": {withMetadata(strings.Replace(written, `"crust"`, `""`, 1)), "", true},
		"no extension":        {nil, "", false},
		"an empty value":      {map[string]*anypb.Any{metadataExtension: nil}, "", false},
		"not JSON":            {withMetadata("{broken"), "", false},
		"another version":     {withMetadata(strings.Replace(written, `"v1"`, `"v2"`, 1)), "", false},
		"no handler in it":    {withMetadata(`{"Version":"v1","Metadata":{}}`), "", false},
		"not a text":          {withMetadata(`{"Version":"v1","Metadata":{"RuntimeHandler":7}}`), "", false},
		"an odd name":         {withMetadata(strings.Replace(written, `"crust"`, `"../crust"`, 1)), "", false},
		"a huge one":          {withMetadata(written + strings.Repeat(" ", maxMetadata)), "", false},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			core, logs := observer.New(zap.DebugLevel)
			tracker := New(Config{}, zap.New(core))
			s, ok := tracker.sandboxOf(&containersapi.Container{
				ID: "sb-1", Labels: map[string]string{kindLabel: kindSandbox, podLabel: "pod-1"}, Extensions: c.extensions,
			})
			if !ok {
				t.Fatal("it is no sandbox")
			}
			tracker.add(s)
			if handler, known := tracker.Handler("sb-1"); handler != c.handler || known != c.known {
				t.Errorf("handler %q, %v", handler, known)
			}
			for _, entry := range logs.All() {
				if line := fmt.Sprint(entry.Message, entry.ContextMap()); strings.Contains(line, "s3cret") {
					t.Errorf("the log has %q", line)
				}
			}
		})
	}
	if handler, known := New(Config{}, zap.NewNop()).Handler("sb-9"); known {
		t.Errorf("a sandbox that nobody knows has handler %q", handler)
	}
}

func TestHandlerIsKnownWithTheSandbox(t *testing.T) {
	fake := newFake(t)
	fake.start()
	fake.put("sb-1", "pod-1", kindSandbox, "", "{}")
	fake.containers["sb-1"].Extensions = withMetadata(written)
	tracker, _ := startTracker(t, fake)
	check.Eventually(t, "sb-1 by listing", func() bool { h, known := tracker.Handler("sb-1"); return known && h == "crust" })
	check.Eventually(t, "subscribed", fake.subscribed)
	fake.run("sb-2", "pod-2")
	check.Eventually(t, "sb-2 by an event", func() bool { _, known := tracker.PodOf("sb-2"); return known })
	if _, known := tracker.Handler("sb-2"); known {
		t.Error("the handler of a sandbox without metadata is known")
	}
}

func TestSandboxesThatAreNoContainersAreWarnedOf(t *testing.T) {
	cases := map[string]struct {
		sandboxers []string
		warns      bool
	}{
		"containerd 1.6": {nil, false},
		"containerd 1.7": {[]string{""}, false},
		"the usual one":  {[]string{"podsandbox", "podsandbox"}, false},
		"another one":    {[]string{"podsandbox", "shim"}, true},
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

// Whatever containerd keeps with a sandbox, its handler is a plain name or not
// known.
func FuzzHandlerOf(f *testing.F) {
	f.Add([]byte(written))
	f.Add([]byte(`{"Version":"v1","Metadata":{"RuntimeHandler":"a/../b"}}`))
	f.Add([]byte(`{"Version":"v1","Metadata":null}`))
	live := New(Config{}, zap.NewNop())
	f.Fuzz(func(t *testing.T, raw []byte) {
		handler := live.handlerOf(&containersapi.Container{Extensions: withMetadata(string(raw))})
		if handler != nil && (strings.ContainsAny(*handler, "/\x00\n ") || len(*handler) > 128 || strings.HasPrefix(*handler, ".")) {
			t.Errorf("%q is taken for a handler", *handler)
		}
	})
}

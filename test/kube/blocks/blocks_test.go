//go:build system

package blocks

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestBlocks asks the way of backup software, with the rights of the example, and gets
// what the driver says itself; and backs up by it.
func TestBlocks(t *testing.T) {
	f := newFixture(t)
	f.write(1, 1, 5, 9, 20, 40)
	first := f.snapshot("monday")
	f.write(2, 5, 50)
	second := f.snapshot("tuesday")
	ask := func(args ...string) string { return f.must(append(append(args, "-o", "raw"), f.client()...)...) }
	itself := func(args ...string) string {
		return f.must(append(append([]string{"blocks", "-o", "raw"}, args...), "--csi-socket", f.socket)...)
	}
	f.server.MaxResults = 2
	for _, most := range []int{0, 1} { // the second time each stream ends after a message
		f.server.MaxMessages = most
		got, want := ask("blocks", "monday"), itself(first)
		check.That(t, got == want && strings.Count(got, "\n") == 5, "allocated: %q, instead of %q", got, want)
		got, want = ask("blocks", "tuesday", "--base", "monday"), itself(second, "--base", first)
		check.That(t, got == want && strings.Count(got, "\n") == 2, "changed: %q, instead of %q", got, want)
		got = ask("blocks", "tuesday", "--base-id", first)
		check.That(t, got == want, "changed since an id: %q, instead of %q", got, want)
	}
	tokens := f.server.Tokens()
	check.That(t, len(tokens) >= 8 && len(slices.Compact(slices.Sorted(slices.Values(tokens)))) == len(tokens),
		"%d streams began with tokens that were used before", len(tokens))

	dir := t.TempDir()
	full, increment, restored := dir+"/full", dir+"/increment", dir+"/restored"
	f.must(append([]string{"backup", "monday", "--from", f.image(first), "--file", full}, f.client()...)...)
	check.Must(t, check.Err(f.Kubectl("-n", "shop", "delete", "volumesnapshot", "monday")))
	f.must(append([]string{"backup", "tuesday", "--from", f.image(second), "--file", increment, "--base-file", full}, f.client()...)...)
	f.must("restore", full, increment, "--to", restored)
	got := check.Value(os.ReadFile(restored))(t)
	want := check.Value(os.ReadFile(f.image(second)))(t)
	check.That(t, bytes.Equal(got, want), "what was restored is not the snapshot")
}

// TestRefusals: each party's answer says what to do.
func TestRefusals(t *testing.T) {
	f := newFixture(t)
	f.write(1, 1)
	first := f.snapshot("monday")
	second := f.snapshot("tuesday")
	f.object("late", driver, first, false)
	f.object("foreign", "other.example.com", first, true)
	f.object("strange", "strange.example.com", first, true)
	f.service("strange.example.com", name+":6443", audience)
	f.object("greedy", "greedy.example.com", first, true)
	f.service("greedy.example.com", name+":6443", "https://kubernetes.default.svc")
	client := f.client()
	with := func(flag, value string) []string {
		changed := slices.Clone(client)
		changed[slices.Index(changed, flag)+1] = value
		return changed
	}
	admin := with("--kubeconfig", f.AdminKubeconfig)
	stranger := slices.Clone(admin)
	stranger[slices.Index(stranger, "--service-account")+1] = "stranger"
	for _, c := range []struct {
		what string
		args []string
		want []string
	}{
		{"the example's client", append([]string{"monday"}, client...), []string{"have data"}},
		{"a snapshot that is not there", append([]string{"sunday"}, client...), []string{"shop/sunday", "not found", "--namespace"}},
		{"one that is not ready", append([]string{"late"}, client...), []string{"shop/late is not ready", "kubectl -n shop describe"}},
		{"a driver without a service", append([]string{"foreign"}, client...), []string{"SnapshotMetadataService other.example.com", "docs/crust-backup.md"}},
		{"a service of another driver", append([]string{"strange"}, client...), []string{"is of driver strange.example.com (InvalidArgument)"}},
		{"the wrong way round", append([]string{"monday", "--base", "tuesday"}, client...), []string{"must be an earlier snapshot"}},
		{"a token that may not be asked for", append([]string{"monday"}, with("--service-account", "stranger")...), []string{"cannot create", "client.yaml"}},
		{"an account without rights", append([]string{"monday"}, stranger...), []string{"backup:stranger may not get volumesnapshots", "Allow the service account"}},
		{"a namespace without rights", append([]string{"monday"}, with("--namespace", "backup")...), []string{"forbidden", "client.yaml"}},
		{"a server of another name", append([]string{"monday"}, with("--address", "127.0.0.1:1")...), []string{"connection refused", "Does the driver run"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			out, err := f.run(append([]string{"blocks"}, c.args...)...)
			check.That(t, (err == nil) == (c.what == "the example's client") && !strings.Contains(out, "rpc error"), "%v: %s", err, out)
			check.Says(t, "it", out, c.want...)
		})
	}
	// Who may write the object must not get the account's rights.
	before := len(f.server.Tokens())
	out, err := f.run(append([]string{"blocks", "greedy"}, client...)...)
	check.That(t, err != nil && strings.Contains(out, "the API server accepts too") && len(f.server.Tokens()) == before,
		"a token for the API server: %v, %s", err, out)
	f.server.Audience = "another.audience"
	out, err = f.run(append([]string{"blocks", "monday"}, client...)...)
	check.That(t, err != nil && strings.Contains(out, "see the audience"), "a token for another audience: %v, %s", err, out)
	f.server.Audience = audience
	f.service(driver, "elsewhere.storage.svc:6443", audience)
	out, err = f.run(append([]string{"blocks", "monday"}, client...)...)
	check.That(t, err != nil && strings.Contains(out, "certificate is valid for"), "a certificate of another name: %v, %s", err, out)
	out = f.must("blocks", second, "--csi-socket", f.socket)
	check.That(t, strings.Contains(out, "have data"), "%v", out)
}

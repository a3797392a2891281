package cli

import (
	"net"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func listenRaw(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	return l
}

func offers(t *testing.T, b *bench, args ...string) []string {
	t.Helper()
	r := b.run(append([]string{"__complete"}, args...)...)
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	if r.code != command.ExitOK || lines[len(lines)-1] != ":4" {
		t.Fatalf("%+v", r)
	}
	return lines[:len(lines)-1]
}

func TestCompletion(t *testing.T) {
	cases := []struct {
		args string
		want string
	}{
		{"get |", "aa11bb22cc33\t/var/lib/kubelet/pods/a/mount bb11bb22cc33\t/var/lib/kubelet/pods/b/mount cc11bb22cc33\t/var/lib/kubelet/pods/c/mount\\x1b[2J"},
		{"stats aa|", "aa11bb22cc33\t/var/lib/kubelet/pods/a/mount"},
		{"expand /var/lib/kubelet/|", "/var/lib/kubelet/pods/a/mount /var/lib/kubelet/pods/b/mount"},
		{"get aa11bb22cc33 |", ""},
		{"list --driver |", "ebs.csi.aws.com lvm topolvm.io"},
		{"watch --handler k|", "kata"},
		{"list --state re|", "published bound degraded removing adopted refused held"},
		{"list -o |", "table wide json yaml"},
	}
	for _, c := range cases {
		t.Run(c.args, func(t *testing.T) {
			b := newBench(t).serve()
			words, begun, _ := strings.Cut(strings.TrimSuffix(c.args, "|"), "\x00")
			args := append(strings.Split(words, " "), begun)
			args = args[:len(args)-1]
			if got := strings.Join(offers(t, b, args...), " "); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestCompletionWithoutDaemonOffersNothing(t *testing.T) {
	if got := offers(t, newBench(t), "get", ""); len(got) != 0 {
		t.Errorf("got %q", got)
	}
}

func TestCompletionSkipsNamesOfSeveralLines(t *testing.T) {
	b := newBench(t)
	b.admin.volumes = append(b.admin.volumes, &adminv1.Volume{Id: strings.Repeat("d", 64), TargetPath: "/x", Driver: "a\nrm -rf"})
	for _, got := range offers(t, b.serve(), "list", "--driver", "") {
		if strings.Contains(got, "rm") {
			t.Errorf("offered %q", got)
		}
	}
}

func TestCompletionScripts(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if r := newBench(t).run("completion", shell); r.code != command.ExitOK || !strings.Contains(r.out, "crustctl") {
			t.Errorf("%s: %d %s", shell, r.code, r.err)
		}
	}
}

package runc

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// keep writes runc's record of a sandbox.
func keep(t *testing.T, root, sandbox, content string) {
	t.Helper()
	check.Must(t, os.MkdirAll(filepath.Join(root, sandbox), 0o700))
	check.Must(t, os.WriteFile(filepath.Join(root, sandbox, "state.json"), []byte(content), 0o600))
}

// sandboxBundle writes the bundle of a container with these annotations.
func sandboxBundle(t *testing.T, root, name string, notes map[string]string) string {
	t.Helper()
	dir := filepath.Join(root, "bundles", name)
	check.Must(t, os.MkdirAll(dir, 0o700))
	raw := check.Value(json.Marshal(specs.Spec{Annotations: notes}))(t)
	check.Must(t, os.WriteFile(dir+"/config.json", raw, 0o600))
	return dir
}

func containerdNotes(id, kind, pod string) map[string]string {
	return map[string]string{
		"io.kubernetes.cri.sandbox-id": id, "io.kubernetes.cri.container-type": kind, "io.kubernetes.cri.sandbox-uid": pod,
	}
}

func TestSandboxProcess(t *testing.T) {
	self := check.Value(process.Of(os.Getpid()))(t)
	root := t.TempDir()
	asked := filepath.Join(root, "runc")
	check.Must(t, os.WriteFile(asked, fmt.Appendf(nil, "#!/bin/sh\n[ \"$1 $2 $3\" = '--root %s state' ] || exit 1\n"+
		"case $4 in other|stale|odd|bare) echo '{\"pid\":%d,\"status\":\"running\",\"bundle\":\"%s/bundles/'$4'\"}' ;; "+
		"ended) echo '{\"pid\":0,\"status\":\"stopped\"}' ;; *) echo unknown >&2; exit 1 ;; esac\n",
		root, os.Getpid(), root), 0o700)) //nolint:gosec // a program
	recorded := func(name, id string, start uint64) {
		bundle := sandboxBundle(t, root, name, containerdNotes(name, "sandbox", "pod"))
		keep(t, root, name, fmt.Sprintf(`{"id":%q,"init_process_pid":%d,"init_process_start":%d,"config":{"labels":["a=b","bundle=%s"]}}`,
			id, self.PID, start, bundle))
	}
	recorded("known", "known", self.Start)
	recorded("stale", "stale", self.Start+1)
	recorded("other", "known", self.Start)
	recorded("odd", "odd", self.Start)
	keep(t, root, "odd", `{"id":"known"`)
	recorded("bare", "bare", self.Start)
	keep(t, root, "bare", fmt.Sprintf(`{"id":"bare","init_process_pid":%d,"init_process_start":%d}`, self.PID, self.Start))
	for sandbox, want := range map[string]string{
		"known": "", "stale": "", "odd": "", "other": "", "bare": "",
		"ended": "has ended", "nobody": "unknown", "../known": "id of a sandbox",
	} {
		p, err := sandboxProcess(asked, handler.Invocation{Root: root}, oci.Sandbox{ID: sandbox, PodUID: "pod"})
		check.That(t, (want != "" || err == nil && p == pause{self}) && (want == "" || err != nil && strings.Contains(err.Error(), want)),
			"%s: %+v, %v", sandbox, p, err)
	}
	// What is on record is not asked.
	p, err := sandboxProcess("/does/not/exist", handler.Invocation{Root: root}, oci.Sandbox{ID: "known", PodUID: "pod"})
	check.That(t, err == nil && p == pause{self}, "%+v, %v", p, err)
}

// TestSandboxThatEndsWhileItIsLookedAt: its number may be another process's by then.
func TestSandboxThatEndsWhileItIsLookedAt(t *testing.T) {
	for then, want := range map[string]string{
		`{"pid":0,"status":"stopped"}`:                            "has ended",
		`{"pid":1,"status":"running"}`:                            "is 1 now",
		fmt.Sprintf(`{"pid":%d,"status":"stopped"}`, os.Getpid()): "has ended",
	} {
		root := t.TempDir()
		bundle := sandboxBundle(t, root, "sandbox", containerdNotes("sandbox", "sandbox", "pod"))
		asked := filepath.Join(root, "runc")
		check.Must(t, os.WriteFile(asked, fmt.Appendf(nil, "#!/bin/sh\nif mkdir %s/asked 2>/dev/null; then\n"+
			"echo '{\"pid\":%d,\"status\":\"running\",\"bundle\":\"%s\"}'\nelse echo '%s'\nfi\n", root, os.Getpid(), bundle, then), 0o700)) //nolint:gosec // a program
		p, err := sandboxProcess(asked, handler.Invocation{Root: root}, oci.Sandbox{ID: "sandbox", PodUID: "pod"})
		check.That(t, err != nil && strings.Contains(err.Error(), want), "%s: %+v, %v", then, p, err)
	}
}

// The id of another container, or of another pod's sandbox, is not believed.
func TestOnlyThePodsOwnSandboxHoldsItsVolumes(t *testing.T) {
	self := check.Value(process.Of(os.Getpid()))(t)
	root := t.TempDir()
	mixed := containerdNotes("mixed", "sandbox", "pod")
	mixed["io.kubernetes.cri-o.SandboxID"] = "mixed"
	for name, c := range map[string]struct {
		notes map[string]string
		want  string
	}{
		"sandbox":   {containerdNotes("sandbox", "sandbox", "pod"), ""},
		"crio":      {map[string]string{"io.kubernetes.cri-o.SandboxID": "crio", "io.kubernetes.cri-o.ContainerType": "sandbox"}, ""},
		"container": {containerdNotes("another", "container", "pod"), "not a sandbox"},
		"copied":    {containerdNotes("another", "sandbox", "pod"), "not a sandbox"},
		"victim":    {containerdNotes("victim", "sandbox", "victims-pod"), "of pod victims-pod"},
		"mixed":     {mixed, "not a sandbox"},
		"plain":     {nil, "not a sandbox"},
	} {
		bundle := sandboxBundle(t, root, name, c.notes)
		keep(t, root, name, fmt.Sprintf(`{"id":%q,"init_process_pid":%d,"init_process_start":%d,"config":{"labels":["bundle=%s"]}}`,
			name, self.PID, self.Start, bundle))
		_, err := sandboxProcess("/does/not/exist", handler.Invocation{Root: root}, oci.Sandbox{ID: name, PodUID: "pod"})
		check.That(t, (err == nil) == (c.want == "") && (err == nil || strings.Contains(err.Error(), c.want)), "%s: %v", name, err)
	}
}

func TestPauseIsToldByItsStart(t *testing.T) {
	found := check.Value(process.Of(os.Getpid()))(t)
	self := pause{found}
	check.Require(t, !self.Ended(), "this process does not live")
	other := self
	other.Start++
	check.Require(t, other.Ended() && (pause{}).Ended(), "a process of another start is taken for the same")
	check.Fails(t, check.Err(other.openVolume("x", abi.Info{}))) // or it is opened in a process of another start
}

// A process of the pod may write to the sandbox's /dev.
func TestNoLinkLeadsOutOfASandbox(t *testing.T) {
	outside, sandbox := t.TempDir(), t.TempDir()
	check.Must(t, os.MkdirAll(outside+"/volume", 0o700))
	check.Must(t, os.MkdirAll(sandbox+"/dev/crust/volume", 0o700))
	root := check.Value(unix.Open(sandbox, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0))(t)
	defer func() { _ = unix.Close(root) }()
	opens := func() error {
		fd, err := sys.OpenBeneath(root, volumesDir[1:]+"/volume", unix.O_PATH|unix.O_DIRECTORY, noSymlinks)
		if err == nil {
			_ = unix.Close(fd)
		}
		return err
	}
	check.Must(t, opens())
	check.Must(t, os.RemoveAll(sandbox+"/dev/crust"))
	for _, to := range []string{outside, "/proc/self/root" + outside, "/proc/self/cwd", "../../" + outside} {
		check.Must(t, os.Symlink(to, sandbox+"/dev/crust"))
		check.That(t, opens() != nil, "a link to %s is followed", to)
		dev := check.Value(unix.Open(sandbox+"/dev", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0))(t)
		if fd, err := makeDir(dev, "crust", unix.O_PATH); err == nil {
			_ = unix.Close(fd)
			t.Errorf("a place is made behind a link to %s", to)
		}
		_ = unix.Close(dev)
		check.Must(t, os.Remove(sandbox+"/dev/crust"))
	}
}

func TestAPodsLockIsNotWaitedForForEver(t *testing.T) {
	dir := t.TempDir()
	var fds [2]int
	for i := range fds {
		fd := check.Value(unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0))(t)
		defer func() { _ = unix.Close(fd) }()
		fds[i] = fd
	}
	check.Must(t, lockWithin(fds[0], time.Second))
	check.Require(t, lockWithin(fds[1], 20*time.Millisecond) != nil, "locked twice")
	check.Must(t, unix.Flock(fds[0], unix.LOCK_UN))
	check.Must(t, lockWithin(fds[1], time.Second))
}

// TestUnreadSandboxIsNotNone: a file that cannot be read may be that of the living sandbox.
func TestUnreadSandboxIsNotNone(t *testing.T) {
	dir, name := publishedDir(t)
	file := check.Value(os.OpenFile(filepath.Join(name, "sandbox1"), os.O_CREATE|os.O_WRONLY, 0o600))(t)
	defer func() { _ = file.Close() }()
	// Whoever opens a file under a lease has to wait, or gets EAGAIN.
	check.Value(unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_WRLCK))(t)
	_, err := findHolder(dir, abi.Info{})
	check.That(t, errors.Is(err, unix.EAGAIN) && !errors.Is(err, handler.ErrNoSandbox), "it says %v", err)
	check.Value(unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_UNLCK))(t)
	check.Is(t, check.Err(findHolder(dir, abi.Info{})), handler.ErrNoSandbox) // of another program
	check.Must(t, file.Truncate(8192))
	check.Is(t, check.Err(findHolder(dir, abi.Info{})), handler.ErrNoSandbox)
}

// publishedDir makes the directory of a volume.
func publishedDir(t *testing.T) (dir *abi.Dir, name string) {
	t.Helper()
	root := t.TempDir()
	name = filepath.Join(root, abi.DirName("/a/target"))
	check.Must(t, os.Mkdir(name, 0o700))
	check.Must(t, os.WriteFile(filepath.Join(name, abi.InfoName), []byte(`{"volume-type":"block","device":"/dev/null","fstype":"ext4"}`), 0o600))
	dir = check.Value(abi.Open(root, filepath.Base(name)))(t)
	t.Cleanup(func() { _ = dir.Close() })
	return dir, name
}

// Only what was created for the sandbox and waits to be started ends with it.
func TestOnlyTheSandboxesUnstartedContainersEnd(t *testing.T) {
	root := t.TempDir()
	waiting := func(id, sandbox, kind string) {
		keep(t, root, id, fmt.Sprintf(`{"id":%q,"config":{"labels":["io.kubernetes.cri.sandbox-id=%s","io.kubernetes.cri.container-type=%s"]}}`,
			id, sandbox, kind))
		check.Must(t, os.WriteFile(filepath.Join(root, id, "exec.fifo"), nil, 0o600))
	}
	waiting("mine", "sandbox", "container")
	waiting("others", "another", "container")
	waiting("started", "sandbox", "container")
	check.Must(t, os.Remove(filepath.Join(root, "started", "exec.fifo")))
	waiting("sandbox", "sandbox", "sandbox")
	waiting("odd", "sandbox", "container")
	check.Must(t, os.WriteFile(filepath.Join(root, "odd", "state.json"), []byte("{"), 0o600))
	runc := filepath.Join(root, "runc")
	check.Must(t, os.WriteFile(runc, []byte("#!/bin/sh\necho \"$@\" >>"+root+"/asked\n"), 0o700)) //nolint:gosec // a program

	for _, args := range [][]string{{"--root", root, "delete", "sandbox"}, {"--root", root, "delete", "others"}, {"delete", "sandbox"}, {"--root", root, "delete"}} {
		check.Must(t, endUnstarted(runc, handler.ParseArgs(args)))
	}
	asked := check.Value(os.ReadFile(filepath.Join(root, "asked")))(t)
	want := "--root " + root + " delete --force mine\n"
	check.That(t, string(asked) == want, "runc was asked %q, not %q", asked, want)
	self := check.Value(process.Of(os.Getpid()))(t)
	keep(t, root, "sandbox", fmt.Sprintf(`{"id":"sandbox","init_process_pid":%d,"init_process_start":%d,"config":{"labels":["bundle=/b"]}}`, self.PID, self.Start))
	check.Must(t, os.Remove(filepath.Join(root, "asked")))
	check.Must(t, endUnstarted(runc, handler.ParseArgs([]string{"--root", root, "delete", "sandbox"})))
	check.Fails(t, check.Err(os.Stat(filepath.Join(root, "asked"))))                     // or the containers of a sandbox that lives were ended
	check.Must(t, os.WriteFile(runc, []byte("#!/bin/sh\necho no >&2; exit 1\n"), 0o700)) //nolint:gosec // a program
	err := endUnstarted(runc, handler.ParseArgs([]string{"--root", root, "delete", "--force", "sandbox"}))
	check.That(t, err != nil && strings.Contains(err.Error(), "container mine") && strings.Contains(err.Error(), "no"),
		"what cannot be ended is told as %v", err)
	// The sandbox stays with it, so that containerd deletes it again, except by force, which it does once. This runtime
	// fails with another status.
	check.Must(t, os.RemoveAll(filepath.Join(root, "sandbox")))
	for _, words := range [][]string{{"sandbox"}, {"--force", "sandbox"}} {
		b := newBecame(t, buildRunc(t), nil, append([]string{"--root", root, "delete"}, words...)...)
		status, deleted := b.status(t), b.out.Len() > 0
		check.That(t, status.ExitStatus() == 1 && strings.Contains(b.stderr.String(), "container mine") && deleted == (len(words) > 1),
			"%q ended with %v, after runc said %q, and said %s", words, status, &b.out, &b.stderr)
	}
}

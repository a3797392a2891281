package conformance

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/cgroup"
)

// container is one that the handler runs.
type container struct {
	n   *node
	id  string
	pid string
}

func newContainer(n *node, kind string) *container { return &container{n: n, id: n.id(kind)} }

// endsWithin bounds the wait for a killed container.
const endsWithin = time.Minute

// create creates the container. It is removed at the end, even if creating it fails.
func (c *container) create(ctx context.Context, spec *specs.Spec) (programResult, error) {
	bundle, err := writeBundle(c.n.path("bundles", c.id), spec)
	if err != nil {
		return programResult{}, err
	}
	c.n.scratch.add(func(ctx context.Context) error {
		return errors.Join(c.removeByForce(ctx), os.RemoveAll(bundle))
	})
	return c.n.handler.run(ctx, "create", "--bundle", bundle, c.id)
}

// startsUnlessRefused creates and starts it, and reports whether it was not refused.
func (c *container) startsUnlessRefused(t *trial, spec *specs.Spec) bool {
	ended, err := c.create(t.ctx, spec)
	t.must(err)
	if ended.code != 0 {
		return false
	}
	_, err = c.n.handler.must(t.ctx, "start", c.id)
	t.must(err)
	return true
}

func (c *container) run(ctx context.Context, spec *specs.Spec) error {
	ended, err := c.create(ctx, spec)
	if err != nil {
		return err
	}
	if ended.code != 0 {
		return fmt.Errorf("create: status %d: %s", ended.code, lastLine(ended.stderr))
	}
	if _, err := c.n.handler.must(ctx, "start", c.id); err != nil {
		return err
	}
	state, err := c.state(ctx)
	if err != nil {
		return err
	}
	c.pid = strconv.Itoa(state.PID)
	return nil
}

type state struct {
	PID    int    `json:"pid"`
	Status string `json:"status"`
}

func (c *container) state(ctx context.Context) (state, error) {
	var is state
	out, err := c.n.handler.must(ctx, "state", c.id)
	if err != nil {
		return is, err
	}
	if err := json.Unmarshal([]byte(out), &is); err != nil {
		return is, fmt.Errorf("its command state printed %.200q, and not JSON with a pid, as runc does: is it a container runtime?", out)
	}
	return is, nil
}

// execTries is how often a runtime may try to start a probe: on a busy node one of hundreds may
// die before it begins, and no demand is about that.
const execTries = 3

func (c *container) exec(ctx context.Context, words ...string) (string, error) {
	args := append([]string{"exec", c.id, "/probe", ProbeWord}, words...)
	for try := 1; ; try++ {
		ended, err := c.n.handler.run(ctx, args...)
		if err != nil || ended.code == 0 {
			return ended.stdout, err
		}
		if strings.Contains(ended.stderr, probeSays) || try == execTries {
			return ended.stdout, fmt.Errorf("%s in the container: %s", strings.Join(words, " "), ended.stderr)
		}
	}
}

func ask[T any](ctx context.Context, c *container, words ...string) (answer T, err error) {
	out, err := c.exec(ctx, words...)
	if err != nil {
		return answer, err
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil {
		return answer, fmt.Errorf("%s in the container: %w", words[0], err)
	}
	return answer, nil
}

// kill kills it and waits for its end. One that has ended already, as those of a virtual
// machine do with their sandbox, cannot be killed, and need not.
func (c *container) kill(ctx context.Context, signal syscall.Signal) error {
	_, killed := c.n.handler.must(ctx, "kill", c.id, strconv.Itoa(int(signal)))
	return eventually(ctx, endsWithin, func(ctx context.Context) error {
		is, err := c.state(ctx)
		if err == nil && is.Status != "stopped" {
			err = errors.Join(killed, fmt.Errorf("the container is %s after it was killed", is.Status))
		}
		return err
	})
}

func (c *container) remove(ctx context.Context) error {
	_, err := c.n.handler.must(ctx, "delete", c.id)
	return err
}

func (c *container) removeByForce(ctx context.Context) error {
	_, err := c.n.handler.must(ctx, "delete", "--force", c.id)
	// If create was killed, the runtime does not know the container any more, but its control groups are left, and
	// perhaps a process in them.
	return errors.Join(err, eventually(ctx, endsWithin, func(context.Context) error {
		cgroup.Kill(c.id)
		return cgroup.Remove(c.id, poll)
	}))
}

// handlerTimeout bounds one call of the handler.
const handlerTimeout = 2 * time.Minute

// handler is the program that is tested, with runc's command line.
type handler struct {
	program string
	state   string   // its --root
	dir     string   // for the output of programs
	stdin   *os.File // of the containers
}

func (h *handler) run(ctx context.Context, words ...string) (programResult, error) {
	ctx, cancel := context.WithTimeout(ctx, handlerTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, h.program, append([]string{"--root", h.state}, words...)...) //nolint:gosec // the program that is tested
	cmd.Stdin = h.stdin
	return runProgram(ctx, h.dir, cmd)
}

func (h *handler) must(ctx context.Context, words ...string) (string, error) {
	got, err := h.run(ctx, words...)
	if err == nil && got.code != 0 {
		err = fmt.Errorf("%s: status %d: %s", words[0], got.code, lastLine(got.stderr))
	}
	return got.stdout, err
}

// programResult is how a program ended, and what it printed.
type programResult struct {
	code           int
	stdout, stderr string
}

// runProgram runs a program in a process group of its own, so that an interrupt at the terminal reaches only us. What
// the program starts keeps its streams open: they are files, because the end of a pipe would be waited for.
func runProgram(ctx context.Context, dir string, cmd *exec.Cmd) (programResult, error) {
	stdout, err := outputFile(dir)
	if err != nil {
		return programResult{}, err
	}
	defer func() { _ = stdout.Close() }()
	stderr, err := outputFile(dir)
	if err != nil {
		return programResult{}, err
	}
	defer func() { _ = stderr.Close() }()
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	if err := cmd.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		return programResult{}, fmt.Errorf("%s cannot be run: %w", cmd.Path, err)
	}
	if err := ctx.Err(); err != nil {
		return programResult{}, fmt.Errorf("%s did not end in time: %w", strings.Join(cmd.Args, " "), err)
	}
	return programResult{code: cmd.ProcessState.ExitCode(), stdout: content(stdout), stderr: strings.TrimSpace(content(stderr))}, nil
}

// outputFile is a file without a name: it goes when its last user closes it.
func outputFile(dir string) (*os.File, error) {
	file, err := os.CreateTemp(dir, "output-")
	if err != nil {
		return nil, err
	}
	return file, os.Remove(file.Name())
}

// maxOutput bounds what is read of a program's output.
const maxOutput = 1 << 20

func content(file *os.File) string {
	text := make([]byte, maxOutput)
	read, _ := file.ReadAt(text, 0)
	return string(text[:read])
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// writeBundle writes a bundle like that of containerd's CRI plugin, as far as volumes are concerned.
func writeBundle(bundle string, spec *specs.Spec) (string, error) {
	if err := os.MkdirAll(bundle, 0o700); err != nil {
		return "", err
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return "", err
	}
	return bundle, os.WriteFile(filepath.Join(bundle, "config.json"), raw, 0o600)
}

func baseSpec(rootfs string, command ...string) *specs.Spec {
	capabilities := []string{
		"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_LINUX_IMMUTABLE",
	}
	return &specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args: append([]string{"/probe", ProbeWord}, command...), Cwd: "/", Env: []string{"PATH=/"}, NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities},
		},
		Root: &specs.Root{Path: rootfs, Readonly: true},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777"}},
		},
		Linux: &specs.Linux{},
	}
}

// sandboxSpec is the pause container.
func (p *pod) sandboxSpec() *specs.Spec {
	spec := baseSpec(p.n.path("rootfs"), "sleep")
	spec.Hostname = "conformance"
	spec.Linux.Namespaces = []specs.LinuxNamespace{
		{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace}, {Type: specs.NetworkNamespace},
	}
	spec.Annotations = p.annotations("sandbox", "")
	return spec
}

// containerSpec is a container of the pod, which shares the sandbox's namespaces.
func (p *pod) containerSpec(name string, binds []bind) *specs.Spec {
	spec := baseSpec(p.n.path("rootfs"), "sleep")
	of := func(ns string) string { return filepath.Join("/proc", p.sandbox.pid, "ns", ns) }
	spec.Linux.Namespaces = []specs.LinuxNamespace{
		{Type: specs.PIDNamespace}, {Type: specs.MountNamespace},
		{Type: specs.IPCNamespace, Path: of("ipc")}, {Type: specs.UTSNamespace, Path: of("uts")}, {Type: specs.NetworkNamespace, Path: of("net")},
	}
	spec.Annotations = p.annotations("container", name)
	for _, b := range binds {
		spec.Mounts = append(spec.Mounts, b.mount())
	}
	return spec
}

func (b bind) mount() specs.Mount {
	return specs.Mount{
		Destination: b.at, Type: "bind", Source: b.source, Options: []string{"rbind", "rprivate", cmp.Or(b.mode, "rw")},
		UIDMappings: b.owners, GIDMappings: b.owners,
	}
}

func (p *pod) annotations(kind, name string) map[string]string {
	all := map[string]string{
		"io.kubernetes.cri.container-type": kind, "io.kubernetes.cri.sandbox-id": p.sandbox.id, "io.kubernetes.cri.sandbox-uid": p.uid,
		"io.kubernetes.cri.sandbox-name": "conformance", "io.kubernetes.cri.sandbox-namespace": "default",
	}
	if name != "" {
		all["io.kubernetes.cri.container-name"] = name
	}
	return all
}

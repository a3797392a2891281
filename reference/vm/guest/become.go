package guest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// become sets terminal, limits, user and capabilities, and executes the workload. It returns
// only if that fails. It changes this thread, which then executes.
func become(p *specs.Process, terminal int) error {
	if len(p.Args) == 0 {
		return fmt.Errorf("no program is named: %w", errInvalid)
	}
	if terminal >= 0 {
		if err := takeTerminal(terminal); err != nil {
			return fmt.Errorf("its terminal: %w", err)
		}
	}
	if err := errors.Join(setLimits(p), chownStreams(int(p.User.UID))); err != nil {
		return err
	}
	if p.Cwd != "" {
		_ = os.MkdirAll(p.Cwd, 0o755) //nolint:gosec // as runc does; if it fails, so does the chdir below
	}
	if err := setUser(p); err != nil {
		return err
	}
	// After the change of the user, who may not be allowed to enter the directory.
	if err := unix.Chdir(p.Cwd); p.Cwd != "" && err != nil {
		return fmt.Errorf("change to %s: %w", p.Cwd, err)
	}
	return execute(p)
}

func execute(p *specs.Process) error {
	os.Clearenv()
	for _, v := range p.Env {
		name, value, _ := strings.Cut(v, "=")
		_ = os.Setenv(name, value)
	}
	if _, given := os.LookupEnv("HOME"); !given {
		home := "/"
		if of, err := user.LookupId(strconv.FormatUint(uint64(p.User.UID), 10)); err == nil && of.HomeDir != "" {
			home = of.HomeDir
		}
		_ = os.Setenv("HOME", home)
	}
	// LookPath uses PATH, which is the workload's now.
	program, err := exec.LookPath(p.Args[0])
	if err != nil {
		return err
	}
	if err := syscall.Exec(program, p.Args, os.Environ()); err != nil { //nolint:gosec // the workload
		return fmt.Errorf("execute %s: %w", program, err)
	}
	return nil
}

// takeTerminal makes a terminal of the container the controlling one, and the standard streams.
func takeTerminal(number int) error {
	slave, err := unix.Open("/dev/pts/"+strconv.Itoa(number), unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.IoctlSetInt(slave, unix.TIOCSCTTY, 0); err != nil {
		return err
	}
	for fd := range 3 {
		if err := unix.Dup3(slave, fd, 0); err != nil {
			return err
		}
	}
	return unix.Close(slave)
}

// chownStreams allows the user to open its streams again, as /dev/stdout.
func chownStreams(uid int) error {
	for fd := range 3 {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(1, 3) {
			continue // anyone can open /dev/null
		}
		if err := unix.Fchown(fd, uid, -1); err != nil {
			return err
		}
	}
	return nil
}

// limits maps the names in a spec to the kernel's numbers.
var limits = map[string]int{
	"RLIMIT_AS": unix.RLIMIT_AS, "RLIMIT_CORE": unix.RLIMIT_CORE, "RLIMIT_CPU": unix.RLIMIT_CPU, "RLIMIT_DATA": unix.RLIMIT_DATA,
	"RLIMIT_FSIZE": unix.RLIMIT_FSIZE, "RLIMIT_LOCKS": unix.RLIMIT_LOCKS, "RLIMIT_MEMLOCK": unix.RLIMIT_MEMLOCK,
	"RLIMIT_MSGQUEUE": unix.RLIMIT_MSGQUEUE, "RLIMIT_NICE": unix.RLIMIT_NICE, "RLIMIT_NOFILE": unix.RLIMIT_NOFILE,
	"RLIMIT_NPROC": unix.RLIMIT_NPROC, "RLIMIT_RSS": unix.RLIMIT_RSS, "RLIMIT_RTPRIO": unix.RLIMIT_RTPRIO,
	"RLIMIT_RTTIME": unix.RLIMIT_RTTIME, "RLIMIT_SIGPENDING": unix.RLIMIT_SIGPENDING, "RLIMIT_STACK": unix.RLIMIT_STACK,
}

func setLimits(p *specs.Process) error {
	score := 0
	if p.OOMScoreAdj != nil {
		score = *p.OOMScoreAdj
	}
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(score)), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, l := range p.Rlimits {
		number, known := limits[l.Type]
		if !known {
			return unsupported("the limit " + l.Type)
		}
		if err := unix.Setrlimit(number, &unix.Rlimit{Cur: l.Soft, Max: l.Hard}); err != nil {
			return fmt.Errorf("set %s: %w", l.Type, err)
		}
	}
	return nil
}

// setUser makes this thread run as the user of the process, with its capabilities.
func setUser(p *specs.Process) error {
	caps, err := parseCapabilities(p.Capabilities)
	if err != nil {
		return err
	}
	if err := caps.Apply(capability.BOUNDS); err != nil {
		return fmt.Errorf("bound its capabilities: %w", err)
	}
	umask := 0o022
	if p.User.Umask != nil {
		umask = int(*p.User.Umask)
	}
	unix.Umask(umask)
	groups := make([]int, 0, len(p.User.AdditionalGids))
	for _, gid := range p.User.AdditionalGids {
		groups = append(groups, int(gid))
	}
	uid, gid := int(p.User.UID), int(p.User.GID)
	// Keep the capabilities when the user changes.
	if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 1, 0, 0, 0); err != nil {
		return err
	}
	if err := errors.Join(unix.Setgroups(groups), unix.Setresgid(gid, gid, gid), unix.Setresuid(uid, uid, uid)); err != nil {
		return fmt.Errorf("become user %d of group %d: %w", uid, gid, err)
	}
	if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 0, 0, 0, 0); err != nil {
		return err
	}
	if err := caps.Apply(capability.CAPS | capability.AMBS); err != nil {
		return fmt.Errorf("set its capabilities: %w", err)
	}
	if p.NoNewPrivileges {
		return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	}
	return nil
}

// parseCapabilities converts the capabilities of a spec. Without any, a process has none.
func parseCapabilities(from *specs.LinuxCapabilities) (capability.Capabilities, error) {
	caps, err := capability.NewPid2(0)
	if err != nil || from == nil {
		return caps, err
	}
	for set, names := range map[capability.CapType][]string{
		capability.BOUNDING: from.Bounding, capability.EFFECTIVE: from.Effective, capability.PERMITTED: from.Permitted,
		capability.INHERITABLE: from.Inheritable, capability.AMBIENT: from.Ambient,
	} {
		for _, name := range names {
			known := slices.IndexFunc(capability.ListKnown(), func(c capability.Cap) bool { return "CAP_"+strings.ToUpper(c.String()) == name })
			if known < 0 {
				return nil, unsupported("the capability " + name)
			}
			caps.Set(set, capability.ListKnown()[known])
		}
	}
	return caps, nil
}

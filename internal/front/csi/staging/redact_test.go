package staging

import (
	"encoding/base64"
	"encoding/json"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestRedactedForms(t *testing.T) {
	const password = `p"ss <wörd>/with & %all+of=it`
	const key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n-----END KEY-----\n"
	secrets := map[string]string{"pin": "007", "eight": "8 digits", "short": "hunter", "long": "hunter2-and-more", "password": password, "key": key,
		"tokens": `{"vault":{"token":"eyJhbGciOi.J9-abc","expirationTimestamp":"2026-01-01T00:00:00Z"}}`}
	asJSON := check.Value(json.Marshal(map[string]string{"k": password}))(t)
	for name, test := range map[string]struct{ text, leak string }{
		"a secret that begins with another one": {"login hunter2-and-more failed", "2-and-more"},
		"as it is":                              {"login " + password + " failed", "ss <w"},
		"quoted":                                {"login " + strconv.Quote(password) + " failed", "ss <w"},
		"quoted as ASCII":                       {"login " + strconv.QuoteToASCII(password) + " failed", "ss <w"},
		"JSON":                                  {"sent " + string(asJSON), "with"},
		"a query":                               {"GET /?p=" + url.QueryEscape(password), "with"},
		"a path":                                {"GET /" + url.PathEscape(password), "with"},
		"base64":                                {"basic " + base64.StdEncoding.EncodeToString([]byte(password)), base64.StdEncoding.EncodeToString([]byte(password))[:20]},
		"base64 for URLs":                       {"basic " + base64.URLEncoding.EncodeToString([]byte(password)), base64.URLEncoding.EncodeToString([]byte(password))[:20]},
		"base64 behind a user":                  {base64.StdEncoding.EncodeToString([]byte("me:hunter2-and-more")), base64.StdEncoding.EncodeToString([]byte("me:hunter2-and-more"))[6:20]},
		"base64 behind a long user":             {base64.StdEncoding.EncodeToString([]byte("root:hunter2-and-more")), base64.StdEncoding.EncodeToString([]byte("root:hunter2-and-more"))[8:20]},
		"all lines in one":                      {"bad key " + strings.ReplaceAll(key, "\n", " "), "hkiG9w0"},
		"one of several tokens":                 {"401 for eyJhbGciOi.J9-abc", "eyJ"},
		"one line":                              {"line 2: hkiG9w0BAQEFAASC", "hkiG9w0"},
		"escaped line ends":                     {"bad key " + strconv.Quote(key), "MIIEvQ"},
		"cut within a secret":                   {"hunter2-and-more" + strings.Repeat(".", longestText-22) + password, password[:6]},
		"the shortest":                          {"pin 007", "007"},
		"base64 of the shortest":                {base64.StdEncoding.EncodeToString([]byte("8 digits")), base64.StdEncoding.EncodeToString([]byte("8 digits"))[:9]},
	} {
		t.Run(name, func(t *testing.T) {
			check.Require(t, strings.Contains(test.text, test.leak), "the test looks for %q, which is not in its text %q", test.leak, test.text)
			got := redact(test.text, secrets)
			check.That(t, !strings.Contains(got, test.leak), "%q was left in %q", test.leak, got)
			check.That(t, strings.Contains(got, "[redacted]"), "nothing is marked as redacted in %q", got)
		})
	}
}

func TestRedactLeavesOtherText(t *testing.T) {
	const text = "the volume vol-1 is of another zone: no such device"
	got := redact(strings.Repeat(".", longestText+1), nil)
	check.That(t, len(got) == longestText, "%d bytes are left of a long text", len(got))
	secrets := map[string]string{"empty": "", "two": "no", "lines": "a\n\nzone\nof"}
	got = redact(text, secrets)
	check.That(t, got == text, "%q became %q", text, got)
}

// TestDetailsOfADriversError may hold a secret in any form: they are kept where there is none.
func TestDetailsOfADriversError(t *testing.T) {
	err := check.Value(status.New(codes.Internal, "no").WithDetails(&csi.Topology{}))(t)
	for secret, want := range map[string]int{"": 1, "hunter2": 0} {
		secrets := map[string]string{"password": secret}
		maps.DeleteFunc(secrets, func(_, value string) bool { return value == "" })
		got := status.Convert((&Driver{Name: "d"}).Error("asked", err.Err(), secrets))
		check.That(t, len(got.Details()) == want && got.Code() == codes.Internal, "with the secret %q: %v", secret, got.Details())
	}
}

// TestMountOptionsWithSecrets: what a record keeps no option for, no error repeats.
func TestMountOptionsWithSecrets(t *testing.T) {
	req := withFlags("noatime", "vers=3,password=hunter2,x", "auth_token=a,b", "secret=c=,d")
	err := (&Driver{Name: "d"}).Error("asked", status.Error(codes.Internal, "mount -o noatime,vers=3,password=hunter2,x,auth_token=a,b,secret=c=,d /dev/x: exit 32"), SecretsOf(req))
	text := status.Convert(err).Message()
	check.That(t, !strings.Contains(text, "hunter2") && !strings.Contains(text, "a,b") && !strings.Contains(text, "c=,d") && strings.Contains(text, "noatime,vers=3"),
		"got %q", text)
}

// TestSecretsAreBounded: who may create a PersistentVolume cannot have the daemon make gigabytes of forms of its
// mount options. An error with more secrets than are searched for has nothing of the driver's text.
func TestSecretsAreBounded(t *testing.T) {
	for name, req := range map[string]*csi.NodeStageVolumeRequest{
		"one flag":     withFlags(strings.Repeat("key=", 2<<10)),
		"a long flag":  withFlags("key=" + strings.Repeat("x", mostBytes+1)),
		"many flags":   withFlags(slices.Repeat([]string{"key=,"}, mostValues)...),
		"many secrets": {Secrets: map[string]string{"bundle": strings.Repeat("a-line-of-it\n", mostBytes/10)}},
	} {
		t.Run(name, func(t *testing.T) {
			secrets := SecretsOf(req)
			check.That(t, len(secrets) <= mostValues+2, "%d values are to be searched for", len(secrets))
			err := status.Error(codes.Internal, "no such key=x")
			got := status.Convert((&Driver{Name: "d"}).Error("asked", err, secrets))
			check.That(t, got.Code() == codes.Internal && got.Message() == "driver d, asked: "+redactedWhole, "got %v", got)
		})
	}
}

// TestManyMountFlags: what looks for secrets in each of half a million flags must allocate nothing for one.
func TestManyMountFlags(t *testing.T) {
	req := withFlags(make([]string, 10_000)...)
	n := testing.AllocsPerRun(1, func() { newStage(req, "") })
	check.That(t, n <= 100, "%v allocations", n)
}

func withFlags(flags ...string) *csi.NodeStageVolumeRequest {
	mount := &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: flags}}
	return &csi.NodeStageVolumeRequest{VolumeCapability: &csi.VolumeCapability{AccessType: mount}}
}

package staging

import (
	"encoding/base64"
	"encoding/json"
	"net/url"
	"strconv"
	"strings"
	"testing"
)

func TestRedactedForms(t *testing.T) {
	const password = `p"ss <wörd>/with & %all+of=it`
	const key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n-----END KEY-----\n"
	secrets := map[string]string{"short": "hunter", "long": "hunter2-and-more", "password": password, "key": key,
		"tokens": `{"vault":{"token":"eyJhbGciOi.J9-abc","expirationTimestamp":"2026-01-01T00:00:00Z"}}`}
	asJSON, err := json.Marshal(map[string]string{"k": password})
	if err != nil {
		t.Fatal(err)
	}
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
		"cut within a secret":                   {strings.Repeat("hunter2-and-more", 4095) + strings.Repeat(".", 16-7) + "hunter2-and-more", "hunter2"},
	} {
		t.Run(name, func(t *testing.T) {
			if !strings.Contains(test.text, test.leak) {
				t.Fatalf("the test looks for %q, which is not in its text %q", test.leak, test.text)
			}
			got := redact(test.text, secrets)
			if strings.Contains(got, test.leak) {
				t.Errorf("%q was left in %q", test.leak, got)
			}
			if !strings.Contains(got, "[redacted]") {
				t.Errorf("nothing is marked as redacted in %q", got)
			}
		})
	}
}

func TestRedactLeavesOtherText(t *testing.T) {
	const text = "the volume vol-1 is of another zone: no such device"
	secrets := map[string]string{"empty": "", "two": "no", "lines": "a\n\nzone\nof"}
	if got := redact(text, secrets); got != text {
		t.Errorf("%q became %q", text, got)
	}
}

//! A service on tokio: clients store values under names and read them back, by TCP.

use std::collections::HashMap;
use std::error::Error;
use std::time::Instant;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::{TcpListener, TcpStream};

const WORKERS: usize = 2;
const CLIENTS: usize = 64;
/// The requests that a client sends before it reads their answers.
const BATCH: usize = 32;
const BATCHES: usize = 200;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

pub fn run(
    report: fn(Instant) -> std::result::Result<(), Box<dyn Error>>,
) -> std::result::Result<(), Box<dyn Error>> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(WORKERS).enable_io().build()?;
    #[cfg(feature = "shepherd")]
    let _running = pinfold::shepherd::Shepherd::new().start()?;
    let begun = Instant::now();
    runtime
        .block_on(serve_clients())
        .map_err(|error| error as Box<dyn Error>)?;
    report(begun)
}

async fn serve_clients() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            tokio::spawn(async move { ask(number, TcpStream::connect(address).await?).await })
        })
        .collect();
    let mut servers = Vec::new();
    for _ in 0..CLIENTS {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        servers.push(tokio::spawn(answer(stream)));
    }
    for task in clients.into_iter().chain(servers) {
        task.await??;
    }
    Ok(())
}

/// Stores values of 16 to 2,000 bytes under 500 names, and reads each one back.
async fn ask(number: usize, stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let (reader, mut writer) = stream.into_split();
    let mut lines = BufReader::new(reader).lines();
    for batch in 0..BATCHES {
        let mut requests = String::new();
        let mut expected = Vec::with_capacity(2 * BATCH);
        for nth in 0..BATCH {
            let key = (batch * BATCH + nth) * 7 % 500;
            let value = "v".repeat(16 + (key * 31 + number) % 1985);
            requests += &format!("set name-{key} {value}\nget name-{key}\n");
            expected.extend(["stored".to_owned(), format!("value {value}")]);
        }
        writer.write_all(requests.as_bytes()).await?;
        for expected in expected {
            let answer = lines.next_line().await?.ok_or("the service has hung up")?;
            if answer != expected {
                return Err(format!("the service answered {answer}").into());
            }
        }
    }
    Ok(())
}

/// Answers the requests of a client until it hangs up.
async fn answer(stream: TcpStream) -> Result<()> {
    let (reader, writer) = stream.into_split();
    let mut lines = BufReader::new(reader).lines();
    let mut writer = BufWriter::new(writer);
    let mut values: HashMap<String, String> = HashMap::new();
    while let Some(line) = lines.next_line().await? {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let answer = match &words[..] {
            [set, key, value] if set == "set" => {
                values.insert(key.clone(), value.clone());
                "stored\n".to_owned()
            }
            [get, key] if get == "get" => match values.get(key) {
                Some(value) => format!("value {value}\n"),
                None => "no value\n".to_owned(),
            },
            _ => "what?\n".to_owned(),
        };
        writer.write_all(answer.as_bytes()).await?;
        if lines.get_ref().buffer().is_empty() {
            writer.flush().await?;
        }
    }
    Ok(())
}
